#pragma once

namespace invar::ops::cpu {

// Runs body(context, index) for every index in [0, count) side by side: 0 on this thread, the others on threads that it
// keeps from call to call. Those sleep between calls, so that more threads than cores disturb nobody. A call from
// inside a body runs all of its indices in turn. The body must not throw. Error{kFault} if a thread cannot be started.
void run_on_threads(int count, void (*body)(const void* context, int index), const void* context);

template <class Body>
void run_on_threads(int count, const Body& body) {
  run_on_threads(
      count, [](const void* context, int index) { (*static_cast<const Body*>(context))(index); }, &body);
}

}  // namespace invar::ops::cpu
