// The queue of one group's collectives, in the order in which they were posted: one runs, the others wait.
#pragma once
#include <ATen/core/LegacyTypeDispatch.h>
#include <deque>
#include "leaving.hpp"
#include "peers.hpp"
#include "plans.hpp"
#include "work.hpp"

namespace manycpu {
// Keep a collective that was started and did not end for ever: oneCCL may still write into its tensors.
inline void bury(std::shared_ptr<void> op) {
  static auto* graves = new std::vector<std::shared_ptr<void>>;
  graves->push_back(std::move(op));
}

struct Op {
  c10::intrusive_ptr<Work> work;
  Plan plan;
  const char* name;
  Milliseconds timeout;
  Clock::time_point deadline;
  Clock::time_point patience;  // until then its end is polled without a pause
  Events events;
  bool started = false;
};

class Line {
 public:
  Line(std::unique_ptr<Comm> comm, std::shared_ptr<Peers> peers, int rank, int size)
      : comm_(std::move(comm)), peers_(std::move(peers)), rank_(rank), size_(size) {}

  Peers& peers() { return *peers_; }

  c10::intrusive_ptr<Work> post(
      c10d::OpType type, const char* name, const Tensors& ins, Plan plan, Milliseconds timeout) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (closed_) std::rethrow_exception(failure("ccl: this group was shut down"));
    if (poison_) std::rethrow_exception(failure(*poison_));
    auto op = std::make_shared<Op>();
    op->work = c10::make_intrusive<Work>(rank_, type, name, ins, plan.outputs, ++number_);
    op->plan = std::move(plan);
    op->name = name;
    op->timeout = timeout;
    op->deadline = Clock::now() + timeout;
    ops_.push_back(op);
    return op->work;
  }

  // Do what is possible without waiting; returns whether more is to do. Only the driving thread calls it.
  bool advance() {
    const auto op = head();
    if (!op) {
      if (closed_) part();
      return false;
    }
    try {
      if (!op->started) start(*op);
      if (is_done(*op)) {
        finish(*op);
        pop()->work->complete(nullptr);
        return true;
      }
    } catch (const std::exception& error) {
      fail(c10::str("ccl: ", op->name, " failed on rank ", rank_, ": ", first_line(error.what())));
      return true;
    }
    look_around(*op);
    return true;
  }

  // Whether to leave the core to other threads for a moment: the collective is overdue, or makes no progress.
  bool is_waiting_for_others() {
    const auto op = head();
    if (!op || !op->started) return false;
    const bool is_exchange = !op->events.empty() && std::holds_alternative<Exchange>(op->events.back());
    return is_exchange ? comm_->shared->is_still() : Clock::now() > op->patience;
  }

  // Fail all collectives in the queue with this message, and all that are posted later.
  void fail(const std::string& message) {
    std::deque<std::shared_ptr<Op>> ops;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      if (!poison_) poison_ = message;
      ops.swap(ops_);
    }
    peers_->tell_of_fault(message);
    for (auto& op : ops) {
      op->work->complete(failure(message));
      if (op->started) bury(op);
    }
  }

  void ask_to_abort() {
    std::lock_guard<std::mutex> lock(mutex_);
    abort_ = true;
  }

  bool is_empty() {
    std::lock_guard<std::mutex> lock(mutex_);
    return ops_.empty();
  }

  // Whether a collective is in the queue, or the closed group can leave now, without further messages from peers.
  bool has_work() { return !is_empty() || (closed_ && comm_ && peers_->parting() != Peers::Parting::waiting); }

  bool is_poisoned() {
    std::lock_guard<std::mutex> lock(mutex_);
    return poison_.has_value();
  }

  uint64_t number() {
    std::lock_guard<std::mutex> lock(mutex_);
    return number_;
  }

  // Accept no more collectives, and tell the peers. Only the driving thread calls this, and what follows.
  void close() {
    if (!is_empty()) fail(c10::str("ccl: rank ", rank_, " ended while a collective was still running"));
    {
      std::lock_guard<std::mutex> lock(mutex_);
      if (closed_) return;
      closed_ = true;
    }
    peers_->say_goodbye();
  }

  bool has_left() const { return closed_ && !comm_; }

  // Destroying a communicator in order waits until its other members do the same: never, if one has died.
  void leave(bool in_order) {
    if (!comm_) return;
    dispose(std::move(comm_), in_order && !is_poisoned());
    peers_->hang_up();
  }

 private:
  static constexpr auto kGrace = Milliseconds(500);       // in which a running collective may still succeed
  static constexpr auto kGraceOfLeft = Milliseconds(2000);
  static constexpr auto kLook = Milliseconds(2);

  static std::string first_line(const std::string& text) { return text.substr(0, text.find('\n')); }

  std::shared_ptr<Op> head() {
    std::lock_guard<std::mutex> lock(mutex_);
    return ops_.empty() ? nullptr : ops_.front();
  }

  std::shared_ptr<Op> pop() {
    std::lock_guard<std::mutex> lock(mutex_);
    auto op = ops_.front();
    ops_.pop_front();
    return op;
  }

  // A collective works on values only, not on gradients.
  using WithoutAutograd = at::AutoDispatchBelowADInplaceOrView;

  void start(Op& op) {
    const WithoutAutograd below;
    op.started = true;
    op.plan.start(*comm_, op.events);
    // By then it would be complete at 0.5 GB/s.
    op.patience = Clock::now() + Milliseconds(1) + std::chrono::nanoseconds(2 * op.plan.bytes);
    next_look_ = Clock::now() + kLook;
  }

  static void finish(Op& op) {
    const WithoutAutograd below;
    op.plan.finish();
  }

  static bool is_done(Op& op) {
    while (!op.events.empty()) {
      if (!std::visit([](auto& event) { return event.test(); }, op.events.back())) return false;
      op.events.pop_back();
    }
    return true;
  }

  void look_around(const Op& op) {
    const auto now = Clock::now();
    if (now < next_look_) return;
    next_look_ = now + kLook;
    peers_->listen();
    const auto where = c10::str(" (seen by rank ", rank_, " of the group of ", size_, " in ", op.name, ")");
    if (wants_abort()) return fail(c10::str("ccl: the group was aborted", where));
    if (const auto news = peers_->fault(); news && now > news->since + kGrace) {
      return fail(news->text.rfind("ccl: ", 0) == 0 ? news->text : c10::str("ccl: ", news->text, where));
    }
    if (const auto news = peers_->departure(); news && now > news->since + kGraceOfLeft) {
      return fail(c10::str("ccl: ", news->text, where));
    }
    if (now > op.deadline) {
      fail(c10::str(
          "ccl: Timed out waiting ", op.timeout.count(), "ms for ", op.name, " to complete on rank ", rank_,
          " of the group of ", size_, ": another rank is slower, has ended, or called something else. The group cannot be used any more"));
    }
  }

  void part() {
    if (const auto now = Clock::now(); now > next_look_) {
      next_look_ = now + kLook;
      peers_->listen();
    }
    const auto parting = peers_->parting();
    if (parting != Peers::Parting::waiting) leave(parting == Peers::Parting::together);
  }

  bool wants_abort() {
    std::lock_guard<std::mutex> lock(mutex_);
    return abort_;
  }

  std::unique_ptr<Comm> comm_;
  std::shared_ptr<Peers> peers_;
  const int rank_, size_;
  std::mutex mutex_;
  std::deque<std::shared_ptr<Op>> ops_;
  std::optional<std::string> poison_;
  bool abort_ = false, closed_ = false;
  uint64_t number_ = 0;
  Clock::time_point next_look_;
};
}  // namespace manycpu
