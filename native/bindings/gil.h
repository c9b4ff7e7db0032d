// Releases and takes Python's global lock for threads that may still run while the interpreter ends.
//
// Until 3.14, Python ends a thread that asks for the lock while the interpreter ends: pthread_exit() unwinds
// the thread's stack. C++ frames that no exception may leave then abort the process. So all code takes the
// lock here; here such a thread stands still until the process is gone, as it does from 3.14 on.
#pragma once

#include <Python.h>
#include <cxxabi.h>
#include <unistd.h>

#include <atomic>

namespace kvxfer::python {

// Set before the interpreter ends, when all agents are closed (lifetime.h).
inline std::atomic<bool> exiting{false};

// For a thread that Python wants to end: its stack is not unwound.
[[noreturn]] inline void stand_still() noexcept {
  for (;;) ::pause();
}

// Returns what f() returns, and raises what it raises. `f` runs Python code, or takes the lock.
template <class F>
auto call_python(F&& f) -> decltype(f()) {
  try {
    return f();
  } catch (const abi::__forced_unwind&) {
    stand_still();
  }
}

// Releases the lock while this object lives, in a thread that holds it.
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

// Destroys an object that needs the lock, on any thread. Once the interpreter ends, the object stays until
// the process ends, because the thread that ends the interpreter may be waiting for this one.
template <class T>
void destroy_with_gil(T* object) noexcept {
  if (Py_IsInitialized() == 0 || exiting) return;
  const PyGILState_STATE state = call_python([] { return PyGILState_Ensure(); });
  delete object;
  PyGILState_Release(state);
}

}  // namespace kvxfer::python
