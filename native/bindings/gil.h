// Python's global lock, given up and taken, by threads that the interpreter's end may meet at any time.
//
// Until 3.14 Python ends a thread that wants the lock while the interpreter ends: pthread_exit() unwinds the
// thread's stack, and frames of C++ that cannot be left by an exception abort the process. So whatever takes the
// lock does it here, and such a thread stands still instead, as it does from 3.14 on, until the process is gone.
#pragma once

#include <Python.h>
#include <cxxabi.h>
#include <unistd.h>

#include <atomic>

namespace kvxfer::python {

// Set before the interpreter ends, when all agents are closed (lifetime.h).
inline std::atomic<bool> exiting{false};

// For a thread that Python ends: its stack stays as it is.
[[noreturn]] inline void stand_still() noexcept {
  for (;;) ::pause();
}

// What f() returns or raises. `f` runs Python code, or takes the lock.
template <class F>
auto call_python(F&& f) -> decltype(f()) {
  try {
    return f();
  } catch (const abi::__forced_unwind&) {
    stand_still();
  }
}

// The lock given up by a thread that has it.
class WithoutGil {
 public:
  WithoutGil() noexcept : state_(PyEval_SaveThread()) {}
  ~WithoutGil() {
    call_python([this] { PyEval_RestoreThread(state_); });
  }
  WithoutGil(const WithoutGil&) = delete;
  WithoutGil& operator=(const WithoutGil&) = delete;

 private:
  PyThreadState* const state_;
};

// Destroys what needs the lock, on any thread. Once the interpreter ends it is left to the process's end: the
// thread that ends the interpreter may be waiting for this one.
template <class T>
void destroy_with_gil(T* object) noexcept {
  if (Py_IsInitialized() == 0 || exiting) return;
  const PyGILState_STATE state = call_python([] { return PyGILState_Ensure(); });
  delete object;
  PyGILState_Release(state);
}

}  // namespace kvxfer::python
