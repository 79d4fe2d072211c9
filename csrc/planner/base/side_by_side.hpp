// The same work for each of several things, on several threads.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <future>
#include <thread>
#include <vector>

namespace hdp {

// Calls task(i) once for each i below num, some at the same time; throws what a task throws.
template <typename Task>
void side_by_side(std::size_t num, const Task& task) {
  constexpr std::size_t kMostThreads = 4;
  const std::size_t cores = std::max<std::size_t>(1, std::thread::hardware_concurrency());
  std::atomic<std::size_t> next{0};
  const auto run = [&] {
    for (std::size_t i = next++; i < num; i = next++) task(i);
  };
  std::vector<std::future<void>> others;
  for (std::size_t i = 1; i < std::min({num, cores, kMostThreads}); ++i) {
    others.push_back(std::async(run));
  }
  run();
  for (std::future<void>& other : others) other.get();
}

}  // namespace hdp
