// The engine drives oneCCL with one thread at a time, which advances the queues of all groups in turn, so that
// ranks may use groups in different orders. A thread that waits for a collective drives; while no thread waits,
// the engine's own thread does, which sleeps while no collective runs.
#pragma once
#include <ATen/Parallel.h>
#include <sched.h>
#include <sys/eventfd.h>
#include <atomic>
#include <functional>
#include <thread>
#include <torch/csrc/utils/pybind.h>
#include "line.hpp"

extern "C" void omp_set_num_threads(int) __attribute__((weak));

namespace manycpu {
// The driving thread may need the interpreter, for callbacks of futures: so release its lock before waiting.
class WithoutGil {
  std::optional<pybind11::gil_scoped_release> released_;

 public:
  WithoutGil() {
    if (Py_IsInitialized() && PyGILState_Check()) released_.emplace();
  }
};

class Engine {
 public:
  // Never destroyed: its thread may outlive all static objects.
  static Engine& get() {
    static auto* engine = new Engine;
    return *engine;
  }

  void add(std::shared_ptr<Line> line) {
    const WithoutGil released;
    alone([&] { lines_.push_back(line); });
    wake();
  }

  // Wait until the queue is empty (each collective has its deadline), then close it. It leaves when all ranks have.
  void remove(const std::shared_ptr<Line>& line) {
    if (is_copy()) return;
    const WithoutGil released;
    drive([&] { return line->is_empty(); }, Clock::time_point::max());
    alone([&] { line->close(); });
    wake();
  }

  // Have the engine's thread look at what was posted.
  void wake() {
    if (!asleep_.exchange(false)) return;
    const uint64_t one = 1;
    (void)!::write(bell_, &one, sizeof(one));
  }

  // Advance all queues in this thread until `is_done` holds, so that no other thread has to be woken up.
  void drive(const std::function<bool()>& is_done, Clock::time_point deadline) {
    if (is_copy()) return;
    const WithoutGil released;
    ++drivers_;
    const auto spins = Clock::now() + kSpin;
    while (!is_done() && Clock::now() < deadline && !stopped_) {
      if (!advance(spins)) ::sched_yield();
    }
    --drivers_;
    if (has_work()) wake();
  }

  // Called before the process ends: running collectives have a moment to end, then the peers are told. Peers may
  // leave much later: `is_patient` waits for them, as MPI's launchers require of a process that succeeds.
  void stop(bool is_patient) {
    if (stopped_) return;
    if (is_copy()) return leave_without_destructors();
    drive([this] { return !has_work(); }, Clock::now() + kParting);
    alone([this] {
      for (auto& line : lines_) line->close();
    });
    drive([this] { return has_no_lines(); }, Clock::now() + kParting);
    if (!is_patient || has_no_lines()) return finish();
    on_exit(
        [](int status, void*) {
          if (status) leave_at_once(status, nullptr);
          get().drive([] { return get().has_no_lines(); }, Clock::time_point::max());
          get().finish();
        },
        nullptr);
  }

 private:
  Engine() : bell_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)), thread_([this] { loop(); }) {}

  // A forked process has no engine thread and no connections: the groups belong to its parent.
  bool is_copy() const { return getpid() != process_; }

  void finish() {
    alone([this] {
      for (auto& line : lines_) line->leave(false);
      lines_.clear();
      stopped_ = true;
    });
    wake();
    if (thread_.joinable()) thread_.join();
  }

  // Recursive: a future's callback may call this again, in the driving thread.
  template <typename Task>
  auto alone(const Task& task) -> decltype(task()) {
    const std::lock_guard<std::recursive_mutex> lock(driving_);
    return task();
  }

  void loop() {
    pthread_setname_np(pthread_self(), "ccl");
    at::internal::lazy_init_num_threads();
    // One core is for this thread: the others are for the computation.
    if (omp_set_num_threads) omp_set_num_threads(1);
    auto last = Clock::now();
    while (!stopped_) {
      if (!drivers_ && advance(last)) {
        last = Clock::now();
      } else if (drivers_ || Clock::now() > last + kLinger) {
        sleep();
        last = Clock::now();
      } else {
        ::sched_yield();
      }
    }
  }

  // Advance each queue once; returns whether more is to do. Until `spins` it does not yield the core.
  bool advance(Clock::time_point spins) {
    bool busy = false, waiting = true;
    alone([&] {
      for (size_t k = 0; k < lines_.size(); ++k) {
        const auto line = lines_[k];
        if (!line->advance()) continue;
        busy = true;
        waiting = waiting && line->is_waiting_for_others();
      }
      std::erase_if(lines_, [](const auto& line) { return line->has_left(); });
    });
    if (busy && waiting) {
      std::this_thread::sleep_for(std::chrono::microseconds(20));
    } else if (busy && Clock::now() > spins) {
      ::sched_yield();
    }
    return busy;
  }

  // Sleep until a collective is posted, or a peer sends a message.
  void sleep() {
    std::vector<pollfd> watched{{bell_, POLLIN, 0}};
    alone([&] {
      for (auto& line : lines_) {
        for (const int descriptor : line->peers().descriptors()) watched.push_back({descriptor, POLLIN, 0});
      }
    });
    asleep_ = true;
    if (stopped_ || (!drivers_ && has_work())) {
      asleep_ = false;
      return;
    }
    ::poll(watched.data(), watched.size(), -1);
    asleep_ = false;
    uint64_t rings;
    (void)!::read(bell_, &rings, sizeof(rings));
    alone([this] {
      for (auto& line : lines_) line->peers().listen();
    });
  }

  bool has_work() {
    return alone([this] {
      return std::any_of(lines_.begin(), lines_.end(), [](const auto& line) { return line->has_work(); });
    });
  }

  bool has_no_lines() {
    return alone([this] { return lines_.empty(); });
  }

  static constexpr auto kParting = Milliseconds(500);
  static constexpr auto kSpin = std::chrono::microseconds(50);  // a small collective is complete by then
  static constexpr auto kLinger = std::chrono::microseconds(30);

  const pid_t process_ = getpid();
  const int bell_;
  std::atomic<bool> asleep_{false}, stopped_{false};
  std::atomic<int> drivers_{0};
  std::recursive_mutex driving_;
  std::vector<std::shared_ptr<Line>> lines_;
  std::thread thread_;
};

inline void drive(const std::function<bool()>& is_done, Clock::time_point deadline) {
  Engine::get().drive(is_done, deadline);
}
}  // namespace manycpu
