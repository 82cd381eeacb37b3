// Leave oneCCL: in order if possible, but never so that the process hangs.
#pragma once
#include <cstdio>
#include <cstdlib>
#include <future>
#include <memory>
#include <thread>
#include "plans.hpp"

namespace manycpu {
inline void leave_at_once(int status, void*) {
  std::fflush(nullptr);
  _exit(status);
}

// While oneCCL has work that never ends, its destructors at exit would wait for that work, or use freed memory:
// then the process ends without destructors, with its own exit code.
inline void leave_without_destructors() {
  static std::once_flag once;
  std::call_once(once, [] { on_exit(leave_at_once, nullptr); });
}

// Destroying a communicator waits for its other members, which may die meanwhile: wait for three seconds at most.
inline void dispose(std::unique_ptr<Comm> comm, bool in_order) {
  auto* left = comm.release();
  if (!in_order) return leave_without_destructors();
  auto done = std::make_shared<std::promise<void>>();
  auto is_done = done->get_future();
  std::thread([=] {
    delete left;
    done->set_value();
  }).detach();
  if (is_done.wait_for(std::chrono::seconds(3)) != std::future_status::ready) leave_without_destructors();
}
}  // namespace manycpu
