// What the unit tests check with: CHECK(condition) prints where and what, if it does not hold.
#pragma once

#include <cstdio>
#include <cstring>

namespace hdp_tests {

inline int num_failed = 0;  // checks of the whole program

inline void check_that(bool holds, const char* text, const char* path, int line) {
  if (holds) return;
  const char* slash = std::strrchr(path, '/');
  std::printf("%s, line %d: %s\n", slash == nullptr ? path : slash + 1, line, text);
  ++num_failed;
}

// What a program of tests ends with. A count would not do: 256 are 0 to whoever looks.
inline int exit_status() { return num_failed == 0 ? 0 : 1; }

}  // namespace hdp_tests

#define CHECK(condition) hdp_tests::check_that((condition), #condition, __FILE__, __LINE__)
