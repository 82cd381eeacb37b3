// How to leave oneCCL: in order, but never so that the process cannot end.
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

// Once oneCCL has work that never ends, its own destructors at exit would wait for it, or touch what is gone:
// the process then ends without them, with the exit code it has.
inline void leave_without_destructors() {
  static std::once_flag once;
  std::call_once(once, [] { on_exit(leave_at_once, nullptr); });
}

// To destroy a communicator waits for its other members, who may die just then: only for a moment.
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
