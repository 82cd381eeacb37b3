// A collective that was posted: what torch waits for.
#pragma once
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <ATen/core/ivalue.h>
#include "types.hpp"

namespace manycpu {
using Milliseconds = std::chrono::milliseconds;

inline std::exception_ptr failure(const std::string& message) {
  const c10::SourceLocation here{__func__, __FILE__, static_cast<uint32_t>(__LINE__)};
  return std::make_exception_ptr(c10::DistBackendError(here, message));
}

class Work : public c10d::Work {
 public:
  Work(int rank, c10d::OpType type, const char* name, Tensors outputs, uint64_t number)
      : c10d::Work(rank, type, name, outputs),
        outputs_(std::move(outputs)),
        number_(number),
        future_(c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()))) {}

  bool wait(Milliseconds timeout) override {
    std::unique_lock<std::mutex> lock(mutex_);
    const auto completed = [this] { return completed_; };
    if (timeout <= Milliseconds::zero()) {
      cv_.wait(lock, completed);
    } else if (!cv_.wait_for(lock, timeout, completed)) {
      std::rethrow_exception(failure(c10::str("ccl: waited ", timeout.count(), " ms in vain for a collective")));
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
