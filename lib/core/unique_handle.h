#pragma once

#include <utility>

namespace invar {

// Move-only owner of a C handle: UniqueHandle<hid_t, H5Fclose, -1>.
template <class Handle, auto Destroy, auto Null = Handle{}>
class UniqueHandle {
 public:
  UniqueHandle() = default;
  explicit UniqueHandle(Handle handle) : handle_(handle) {}
  UniqueHandle(UniqueHandle&& other) noexcept : handle_(std::exchange(other.handle_, Null)) {}
  UniqueHandle& operator=(UniqueHandle&& other) noexcept {
    std::swap(handle_, other.handle_);
    return *this;
  }
  UniqueHandle(const UniqueHandle&) = delete;
  UniqueHandle& operator=(const UniqueHandle&) = delete;
  ~UniqueHandle() {
    if (handle_ != Null) Destroy(handle_);
  }

  Handle get() const { return handle_; }
  explicit operator bool() const { return handle_ != Null; }

 private:
  Handle handle_ = Null;
};

}  // namespace invar
