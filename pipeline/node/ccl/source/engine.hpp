// The one thread of a process that calls oneCCL: it advances the lines of all groups in turn, so that groups
// may be used in another order on another rank, and sleeps while nothing is under way.
#pragma once
#include <ATen/Parallel.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <sched.h>
#include <sys/eventfd.h>
#include <atomic>
#include <condition_variable>
#include <thread>
#include "line.hpp"

extern "C" void omp_set_num_threads(int) __attribute__((weak));

namespace manycpu {
class Engine {
 public:
  // Never destroyed: its thread may outlive everything static.
  static Engine& get() {
    static auto* engine = new Engine;
    return *engine;
  }

  void add(std::shared_ptr<Line> line) {
    run([this, line] { lines_.push_back(line); });
  }

  // Wait for what is in line, each for its own deadline at most, then close it.
  void remove(const std::shared_ptr<Line>& line) {
    if (!is_mine()) drain(*line, Clock::time_point::max());
    run([this, line] {
      std::erase(lines_, line);
      line->close();
    });
  }

  void wake() {
    if (!asleep_.exchange(false)) return;
    const uint64_t one = 1;
    (void)!::write(bell_, &one, sizeof(one));
  }

  // Before the process ends: what is under way may end, for a moment; then everyone is told.
  void stop() {
    if (stopped_) return;
    std::vector<std::shared_ptr<Line>> lines;
    run([&] { lines = lines_; });
    const auto deadline = Clock::now() + std::chrono::seconds(1);
    for (auto& line : lines) drain(*line, deadline);
    run([this] {
      for (auto& line : lines_) line->close();
      lines_.clear();
      stopped_ = true;
    });
    if (thread_.joinable()) thread_.join();
  }

 private:
  using Task = std::function<void()>;

  Engine() : bell_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)), thread_([this] { loop(); }) {}

  bool is_mine() const { return std::this_thread::get_id() == thread_.get_id(); }

  // Have the thread do this, between two steps.
  void run(const Task& task) {
    if (is_mine() || stopped_) return task();
    std::unique_lock<std::mutex> lock(mutex_);
    bool done = false;
    tasks_.push_back([&] {
      task();
      done = true;
    });
    asleep_ = true;  // also where it is about to sleep
    wake();
    ran_.wait(lock, [&] { return done; });
  }

  void drain(Line& line, Clock::time_point deadline) {
    while (!line.is_empty() && Clock::now() < deadline && !stopped_) {
      std::this_thread::sleep_for(std::chrono::microseconds(200));
    }
  }

  void loop() {
    pthread_setname_np(pthread_self(), "ccl");
    at::internal::lazy_init_num_threads();
    // Its share of the cores is one: the others belong to the computation.
    if (omp_set_num_threads) omp_set_num_threads(1);
    const at::AutoDispatchBelowADInplaceOrView below;
    auto last = Clock::now();
    while (!stopped_) {
      run_tasks();
      if (advance()) {
        last = Clock::now();
      } else if (Clock::now() > last + kLinger) {
        sleep();
        last = Clock::now();
      } else {
        ::sched_yield();
      }
    }
  }

  bool advance() {
    bool busy = false, waiting = true;
    for (size_t k = 0; k < lines_.size(); ++k) {
      const auto line = lines_[k];
      if (!line->advance()) continue;
      busy = true;
      waiting = waiting && line->is_waiting_for_others();
    }
    if (busy && waiting) {
      std::this_thread::sleep_for(std::chrono::microseconds(20));
    } else if (busy) {
      ::sched_yield();
    }
    return busy;
  }

  void run_tasks() {
    if (!has_tasks()) return;
    std::lock_guard<std::mutex> lock(mutex_);
    for (auto& task : tasks_) task();
    tasks_.clear();
    ran_.notify_all();
  }

  bool has_tasks() {
    std::lock_guard<std::mutex> lock(mutex_);
    return !tasks_.empty();
  }

  // Until something is posted, or a peer has something to say.
  void sleep() {
    std::vector<pollfd> watched{{bell_, POLLIN, 0}};
    for (auto& line : lines_) {
      for (const int descriptor : line->peers().descriptors()) watched.push_back({descriptor, POLLIN, 0});
    }
    asleep_ = true;
    if (!is_idle()) {
      asleep_ = false;
      return;
    }
    ::poll(watched.data(), watched.size(), -1);
    asleep_ = false;
    uint64_t rings;
    (void)!::read(bell_, &rings, sizeof(rings));
    for (auto& line : lines_) line->peers().listen();
  }

  bool is_idle() {
    for (auto& line : lines_) {
      if (!line->is_empty()) return false;
    }
    return !has_tasks() && !stopped_;  // it may have been a task that stopped it
  }

  static constexpr auto kLinger = std::chrono::microseconds(30);

  const int bell_;
  std::atomic<bool> asleep_{false}, stopped_{false};
  std::mutex mutex_;
  std::condition_variable ran_;
  std::vector<Task> tasks_;
  std::vector<std::shared_ptr<Line>> lines_;
  std::thread thread_;
};
}  // namespace manycpu
