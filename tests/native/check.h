// A test harness in one header, so that a machine that has only a compiler can run the native tests.
//
//   #include "check.h"
//   TEST(write_after_rail_death_completes_on_survivors) {
//     REQUIRE(agent.ok());          // a failure ends this test
//     CHECK_EQ(num_pieces, 12);     // a failure is printed, the test goes on
//   }
//
// The header brings a (weak) main: `./program [--seed N] [--list] [--file test_x] [part of a test's name]`; without
// --seed the environment's KVXFER_SEED counts, which docs/testing.md explains. --file runs the tests of one file.
// It prints one line a failure and ends with "N passed, N failed"; exit status 1 on failure, 77 if all was skipped.
// TESTs must have distinct names in one binary. CHECKs belong on the test's own thread.
#pragma once

#include <algorithm>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <functional>
#include <iterator>
#include <limits>
#include <ostream>
#include <sstream>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

namespace check {

struct Case {
  const char* file;
  const char* name;
  void (*run)();
};

// The seed of the environment (KVXFER_SEED), so that all tests of a run have the same one.
inline std::uint64_t seed_of_run() {
  const char* const wanted = std::getenv("KVXFER_SEED");
  return wanted != nullptr && *wanted != '\0' ? std::strtoull(wanted, nullptr, 0) : 1;
}

// A file whose tests need something of the machine.
struct Need {
  const char* file;
  std::string (*missing)();  // says what is not there; "" if all is
};

// A file that is no list of tests: --file calls it with the arguments that follow.
struct Program {
  const char* file;
  int (*run)(int argc, char** argv);
};

struct State {
  std::vector<Case> cases;
  std::vector<Need> needs;
  std::vector<Program> programs;
  std::uint64_t seed = seed_of_run();
  const char* current = "";
  std::size_t num_failures = 0;  // in the current test
};

inline State& state() {
  static State the_state;
  return the_state;
}

// The seed of this run: 1 unless --seed or KVXFER_SEED sets it. Derive every random choice of a test from it.
inline std::uint64_t seed() { return state().seed; }

// splitmix64: it gives the same numbers on every machine, which the distributions of <random> do not promise.
class Random {
 public:
  explicit Random(std::uint64_t first) : state_(first) {}
  std::uint64_t next() {
    std::uint64_t z = state_ += 0x9e3779b97f4a7c15u;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
  }
  std::uint64_t below(std::uint64_t bound) { return next() % bound; }  // bound > 0
  std::uint64_t between(std::uint64_t low, std::uint64_t high) { return low + below(high - low + 1); }
  std::uint32_t between32(std::uint32_t low, std::uint32_t high) {
    return static_cast<std::uint32_t>(between(low, high));
  }
  bool chance(unsigned percent) { return below(100) < percent; }
  template <class T>
  void fill(T* data, std::size_t count) {
    for (std::size_t i = 0; i < count; ++i) data[i] = static_cast<T>(next());
  }
  template <class Container>
  void shuffle(Container& items) {
    for (std::size_t i = items.size(); i > 1; --i) std::swap(items[i - 1], items[below(i)]);
  }

 private:
  std::uint64_t state_;
};

struct RequirementFailed {};

inline void fail(const char* file, int line, const std::string& what) {
  ++state().num_failures;
  std::printf("%s:%d: %s: %s\n", file, line, state().current, what.c_str());
  std::fflush(stdout);
}

template <class T>
std::string show(const T& value) {
  using D = std::decay_t<T>;
  if constexpr (std::is_same_v<D, bool>) {
    return value ? "true" : "false";
  } else if constexpr (std::is_same_v<D, std::byte>) {
    return std::to_string(std::to_integer<unsigned>(value));
  } else if constexpr (std::is_enum_v<D>) {
    return std::to_string(+static_cast<std::underlying_type_t<D>>(value));
  } else if constexpr (std::is_integral_v<D>) {
    return std::to_string(+value);
  } else if constexpr (requires(std::ostream& out) { out << value; }) {
    std::ostringstream out;
    out << '"' << value << '"';
    return out.str();
  } else if constexpr (requires {
                         std::begin(value);
                         std::end(value);
                         std::size(value);
                       }) {
    std::string out = "[";
    std::size_t shown = 0;
    for (const auto& item : value) {
      if (shown++ == 16) {
        out += " ... " + std::to_string(std::size(value)) + " in all";
        break;
      }
      if (shown > 1) out += " ";
      out += show(item);
    }
    return out + "]";
  } else if constexpr (requires {
                         value.code();
                         value.message();
                       }) {
    return show(value.code()) + " \"" + std::string(value.message()) + "\"";
  } else if constexpr (requires { value.status(); }) {
    return show(value.status());
  } else {
    return "(" + std::to_string(sizeof(value)) + " bytes)";
  }
}

template <class T>
concept PlainInteger = std::integral<T> && !std::same_as<T, bool> && !std::same_as<T, char>;

// Integers compare by value, whatever their signs and widths.
template <class A, class B>
bool equal(const A& a, const B& b) {
  if constexpr (PlainInteger<A> && PlainInteger<B>) {
    return std::cmp_equal(a, b);
  } else {
    return a == b;
  }
}

template <class A, class B>
bool check_equal(const char* file, int line, const char* text, const A& a, const B& b) {
  if (equal(a, b)) return true;
  fail(file, line, std::string(text) + ": " + show(a) + " is not " + show(b));
  return false;
}

inline void check_has(const char* file, int line, std::string_view text, std::string_view words) {
  if (text.find(words) == std::string_view::npos)
    fail(file, line, show(text) + " does not say: " + std::string(words));
}

template <class T, class Code>
void check_refused(const char* file, int line, const T& status, Code code, std::string_view words) {
  check_equal(file, line, "its code", status.code(), code);
  check_has(file, line, status.message(), words);
}

template <class T>
bool check_ok(const char* file, int line, const char* text, const T& outcome) {
  if (outcome.ok()) return true;
  fail(file, line, std::string(text) + " failed: " + show(outcome));
  return false;
}

struct Registration {
  Registration(const char* file, const char* name, void (*run)()) {
    state().cases.push_back({file, name, run});
  }
  Registration(const char* file, std::string (*missing)()) { state().needs.push_back({file, missing}); }
  Registration(const char* file, int (*run)(int argc, char** argv)) {
    state().programs.push_back({file, run});
  }
};

inline constexpr int kSkipped = 77;  // an exit status: what CMakeLists.txt takes for that

inline int usage(const char* program) {
  std::printf("usage: %s [--seed N] [--list] [--file test_x] [part of a test's name]\n", program);
  return 2;
}

// `path` without its folders and its ending.
inline std::string_view stem(std::string_view path) {
  path.remove_prefix(path.rfind('/') + 1);
  return path.substr(0, path.rfind('.'));
}

inline int run_all(int argc, char** argv) {
  std::string filter, file;
  bool list = false;
  for (int i = 1; i < argc; ++i) {
    const std::string_view arg = argv[i];
    if (arg == "--seed" && i + 1 < argc) {
      state().seed = std::strtoull(argv[++i], nullptr, 0);
    } else if (arg == "--file" && i + 1 < argc) {
      file = argv[++i];
      for (const Program& program : state().programs)
        if (stem(program.file) == file) {
          argv[i] = argv[0];
          return program.run(argc - i, argv + i);
        }
    } else if (arg == "--list") {
      list = true;
    } else if (!arg.empty() && arg[0] != '-' && filter.empty()) {
      filter = arg;
    } else {
      return usage(argv[0]);
    }
  }
  std::vector<std::string_view> skipped;
  for (const Need& need : state().needs) {
    if (list || (!file.empty() && stem(need.file) != file)) continue;
    const std::string missing = need.missing();
    if (missing.empty()) continue;
    std::printf("skipped: %s\n", missing.c_str());
    skipped.push_back(stem(need.file));
  }
  std::size_t num_passed = 0, num_failed = 0;
  for (const Case& test : state().cases) {
    if (std::string_view(test.name).find(filter) == std::string_view::npos) continue;
    if (!file.empty() && stem(test.file) != file) continue;
    if (std::find(skipped.begin(), skipped.end(), stem(test.file)) != skipped.end()) continue;
    if (list) {
      std::printf("%s\n", test.name);
      continue;
    }
    state().current = test.name;
    state().num_failures = 0;
    try {
      test.run();
    } catch (const RequirementFailed&) {
    } catch (const std::exception& error) {
      fail(__FILE__, __LINE__, std::string("threw ") + error.what());
    }
    if (state().num_failures == 0) {
      ++num_passed;
    } else {
      ++num_failed;
      std::printf("FAILED %s (again: %s --seed %llu %s)\n", test.name, argv[0],
                  static_cast<unsigned long long>(seed()), test.name);
    }
  }
  if (list) return 0;
  if (num_passed + num_failed == 0 && !skipped.empty()) return kSkipped;
  if (num_passed + num_failed == 0) {
    std::printf("no test of %s has a name that contains \"%s\"\n", file.empty() ? "any file" : file.c_str(),
                filter.c_str());
    return 1;
  }
  std::printf("%zu passed, %zu failed (seed %llu)\n", num_passed, num_failed,
              static_cast<unsigned long long>(seed()));
  return num_failed == 0 ? 0 : 1;
}

}  // namespace check

#define TEST(name)                                                                       \
  static void test_##name();                                                             \
  static const ::check::Registration registration_##name(__FILE__, #name, &test_##name); \
  static void test_##name()

#define KVXFER_CHECK_JOINED(a, b) a##b
#define KVXFER_CHECK_NAME(a, b) KVXFER_CHECK_JOINED(a, b)
// Skips this file's tests where `missing()`, a std::string, is not empty.
#define SKIP_FILE_FOR(missing) \
  static const ::check::Registration KVXFER_CHECK_NAME(need_, __COUNTER__)(__FILE__, missing)
// Makes `run`, a main(), what this file does.
#define FILE_IS_PROGRAM(run) \
  static const ::check::Registration KVXFER_CHECK_NAME(program_, __COUNTER__)(__FILE__, run)

#define CHECK(...) ((__VA_ARGS__) ? void() : ::check::fail(__FILE__, __LINE__, "not so: " #__VA_ARGS__))
#define CHECK_EQ(a, b) static_cast<void>(::check::check_equal(__FILE__, __LINE__, #a " == " #b, (a), (b)))
// Checks a Status or a Result: if it is not ok, prints its code and sentence.
#define CHECK_OK(...) static_cast<void>(::check::check_ok(__FILE__, __LINE__, #__VA_ARGS__, (__VA_ARGS__)))
// Checks that a sentence has these words: if it has not, prints it.
#define CHECK_HAS(text, words) ::check::check_has(__FILE__, __LINE__, (text), (words))
// Checks a Status: that it has this code, and these words.
#define CHECK_REFUSED(status, code, words) \
  ::check::check_refused(__FILE__, __LINE__, (status), (code), (words))
#define FAIL(what) ::check::fail(__FILE__, __LINE__, (what))

#define REQUIRE(...) \
  ((__VA_ARGS__)     \
       ? void()      \
       : (::check::fail(__FILE__, __LINE__, "not so: " #__VA_ARGS__), throw ::check::RequirementFailed{}))
#define REQUIRE_EQ(a, b)                                                     \
  (::check::check_equal(__FILE__, __LINE__, #a " == " #b, (a), (b)) ? void() \
                                                                    : throw ::check::RequirementFailed{})
#define REQUIRE_OK(...)                                                        \
  (::check::check_ok(__FILE__, __LINE__, #__VA_ARGS__, (__VA_ARGS__)) ? void() \
                                                                      : throw ::check::RequirementFailed{})

// Weak, so that several test files may be linked into one binary.
// Up to g++ 13, ASan may take memory for the header of a library's thread-local block, and its search for leaks at the
// end then reads what is not there.
extern "C" __attribute__((weak, visibility("default"))) const char* __asan_default_options() {
  return "intercept_tls_get_addr=0";
}

__attribute__((weak)) int main(int argc, char** argv) { return ::check::run_all(argc, argv); }
