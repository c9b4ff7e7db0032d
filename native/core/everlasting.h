// Objects of the process that no exit destroys: threads and arrays may outlive every static object.
#pragma once

namespace kvxfer {

// As a static object it needs no memory, so destructors may use it, too.
template <class T>
class Everlasting {
 public:
  Everlasting() : object_() {}
  ~Everlasting() {}
  Everlasting(const Everlasting&) = delete;
  Everlasting& operator=(const Everlasting&) = delete;
  T& get() noexcept { return object_; }

 private:
  union { T object_; };
};

}  // namespace kvxfer
