// What unit tests are made of: TEST(name) { ... } runs in every program that it is linked into, and
// CHECK(condition) prints where and what, if it does not hold.
#pragma once

#include <cstdio>
#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

namespace hdp_tests {

inline int num_failed = 0;  // checks of the whole program

inline void check_that(bool holds, const char* text, const char* path, int line) {
  if (holds) return;
  const char* slash = std::strrchr(path, '/');
  std::printf("%s, line %d: %s\n", slash == nullptr ? path : slash + 1, line, text);
  ++num_failed;
}

inline std::vector<void (*)()>& tests() {
  static std::vector<void (*)()> all;
  return all;
}

struct Registered {
  explicit Registered(void (*test)()) { tests().push_back(test); }
};

// What a program of tests ends with. A count would not do: 256 are 0 to whoever looks.
inline int run_tests() {
  for (void (*test)() : tests()) test();
  return num_failed == 0 && !tests().empty() ? 0 : 1;
}

// What an action is refused with; "no error" if it is not.
template <typename Action>
std::string refusal(const Action& action) {
  try {
    action();
  } catch (const std::invalid_argument& error) {
    return error.what();
  }
  return "no error";
}

template <typename Action>
bool is_refused(const Action& action) {
  return refusal(action) != "no error";
}

}  // namespace hdp_tests

#define TEST(name)                                     \
  void name();                                         \
  const hdp_tests::Registered registered_##name(name); \
  void name()
#define CHECK(condition) hdp_tests::check_that((condition), #condition, __FILE__, __LINE__)
