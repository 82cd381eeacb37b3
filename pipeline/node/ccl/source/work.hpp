// A posted collective, for which torch waits.
#pragma once
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <ATen/core/ivalue.h>
#include <functional>
#include "types.hpp"

namespace manycpu {
using Clock = std::chrono::steady_clock;
using Milliseconds = std::chrono::milliseconds;

inline std::exception_ptr failure(const std::string& message) {
  const c10::SourceLocation here{__func__, __FILE__, static_cast<uint32_t>(__LINE__)};
  return std::make_exception_ptr(c10::DistBackendError(here, message));
}

// Advance all collectives in this thread, until `is_done` holds or the deadline has passed.
void drive(const std::function<bool()>& is_done, Clock::time_point deadline);

class Work : public c10d::Work {
 public:
  // Profilers show it like collectives of torch's own backends: `ccl:all_reduce`, with the shapes of its inputs.
  Work(int rank, c10d::OpType type, const char* name, const Tensors& inputs, Tensors outputs, uint64_t number)
      : c10d::Work(rank, type, ("ccl:" + std::string(name)).c_str(), inputs),
        outputs_(std::move(outputs)),
        number_(number),
        future_(c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()))) {}

  bool wait(Milliseconds timeout) override {
    const bool is_endless = timeout <= Milliseconds::zero();
    drive([this] { return isCompleted(); }, is_endless ? Clock::time_point::max() : Clock::now() + timeout);
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!completed_) {
      std::rethrow_exception(failure(c10::str("ccl: Timed out waiting ", timeout.count(), "ms for a collective to complete")));
    }
    if (exception_) std::rethrow_exception(exception_);
    return true;
  }

  void abort() override { TORCH_CHECK(false, "ccl: one collective cannot be aborted, its group can"); }
  Tensors result() override { return outputs_; }
  uint64_t getSequencenumber() const override { return number_; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future_; }

  void complete(std::exception_ptr error) {
    finish(error);
    if (error) {
      future_->setError(std::move(error));
    } else {
      future_->markCompleted(c10::IValue(outputs_));
    }
  }

 private:
  Tensors outputs_;
  uint64_t number_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};
}  // namespace manycpu
