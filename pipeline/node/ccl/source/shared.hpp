// Allreduce among the ranks of one host, through a small shared memory that stays in the caches. Of each chunk a
// rank writes the parts of the other ranks to the memory, reduces its own part, and reads all parts. With two
// ranks, and for small tensors, each rank writes and reduces the whole chunk: that moves as much data. While a
// rank waits for others it works on the next chunks. It reads and writes its tensor once, as a copy would.
#pragma once
#include <sys/mman.h>
#include <unistd.h>
#include <atomic>
#include <cstring>
#include "rows.hpp"
#include "work.hpp"

namespace manycpu {
class Shared {
 public:
  static constexpr size_t kChunk = 64 << 10;  // bytes; the chunks in progress fit into a core's own cache
  static constexpr size_t kSlots = 4;         // chunks in progress

  // How many chunks a rank has written, reduced and read since the group began; and the kinds of its requests.
  struct Counts {
    alignas(64) std::atomic<uint64_t> brought;
    std::atomic<uint64_t> kinds[kSlots];
    alignas(64) std::atomic<uint64_t> reduced;
    alignas(64) std::atomic<uint64_t> taken;
  };
  static constexpr size_t kPage = 4096;
  static constexpr size_t kPart = kPage + kSlots * kChunk;  // of the memory, for each rank
  static_assert(sizeof(Counts) <= kPage && std::atomic<uint64_t>::is_always_lock_free);

  // Takes the descriptor of a memory of zeroes that all ranks have opened.
  Shared(int descriptor, int rank, int size) : rank(rank), size(size), rows(size) {
    void* start = ::mmap(nullptr, size * kPart, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
    ::close(descriptor);
    TORCH_CHECK(start != MAP_FAILED, "ccl: cannot map the memory that the ranks share: ", std::strerror(errno));
    start_ = static_cast<char*>(start);
  }
  ~Shared() { ::munmap(start_, size * kPart); }
  Shared(const Shared&) = delete;
  Shared& operator=(const Shared&) = delete;

  Counts& counts(int of) const { return *reinterpret_cast<Counts*>(start_ + of * kPart); }
  char* slot(int of, uint64_t chunk) const { return start_ + of * kPart + kPage + chunk % kSlots * kChunk; }

  bool have_all(std::atomic<uint64_t> Counts::* count, uint64_t chunks) const {
    for (int of = 0; of < size; ++of) {
      if ((counts(of).*count).load(std::memory_order_acquire) < chunks) return false;
    }
    return true;
  }

  // Whether the other ranks have made no progress for a while: then leave the core to the computation.
  bool is_still() const { return Clock::now() > moved + kStill; }

  const int rank, size;
  uint64_t complete = 0;    // chunks of earlier exchanges
  Clock::time_point moved;  // time of the last progress
  std::vector<const void*> rows;

 private:
  static constexpr auto kStill = std::chrono::microseconds(200);

  char* start_;
};

// A dense row of elements to reduce, in place.
struct Row {
  char* data;
  size_t elements, width;
  rows::Combine combine;
  uint64_t kind;  // equal on all ranks that request the same reduction
};

// One allreduce: `test` does what is possible without waiting, and returns whether it is complete.
class Exchange {
 public:
  Exchange(Shared& shared, const Row& row)
      : shared_(&shared),
        row_(row),
        bytes_(row.elements * row.width),
        chunks_((bytes_ + Shared::kChunk - 1) / Shared::kChunk),
        everyone_reduces_all_(shared.size == 2 || bytes_ <= kSmall) {}

  bool test() {
    if (!brought_) first_ = shared_->complete;
    int steps = 0;
    while (steps < kSteps && step()) ++steps;
    if (steps) shared_->moved = Clock::now();
    if (taken_ < chunks_) return false;
    shared_->complete = first_ + chunks_;
    return true;
  }

 private:
  static constexpr int kSteps = 16;       // at most, before other groups have their turn
  static constexpr size_t kSmall = 4096;  // bytes

  struct Span {
    size_t start, bytes;
  };

  bool step() {
    const bool took = take(), reduced = reduce(), brought = bring();
    return took || reduced || brought;
  }

  char* data(uint64_t chunk) const { return row_.data + chunk * Shared::kChunk; }

  size_t bytes_of(uint64_t chunk) const {
    return std::min(Shared::kChunk, bytes_ - chunk * Shared::kChunk);
  }

  // The part of a chunk that a rank reduces, in whole cache lines.
  Span part(int rank, uint64_t chunk) const {
    const size_t bytes = bytes_of(chunk);
    const size_t lines = (bytes + 63) / 64, each = (lines + shared_->size - 1) / shared_->size * 64;
    const size_t start = std::min(bytes, rank * each);
    return {start, std::min(bytes - start, each)};
  }

  bool bring() {
    const auto number = first_ + brought_;
    if (brought_ == chunks_) return false;
    // Wait until all ranks have read the chunk that was in this slot.
    if (number >= Shared::kSlots && !shared_->have_all(&Shared::Counts::taken, number - Shared::kSlots + 1)) return false;
    char* slot = shared_->slot(shared_->rank, number);
    for (int rank = 0; rank < shared_->size; ++rank) {
      if (rank == shared_->rank && !everyone_reduces_all_) continue;
      const auto [start, bytes] = part(rank, brought_);
      std::memcpy(slot + start, data(brought_) + start, bytes);
    }
    auto& counts = shared_->counts(shared_->rank);
    counts.kinds[number % Shared::kSlots].store(row_.kind, std::memory_order_relaxed);
    counts.brought.store(number + 1, std::memory_order_release);
    ++brought_;
    return true;
  }

  bool reduce() {
    const auto number = first_ + reduced_;
    if (reduced_ == brought_ || !shared_->have_all(&Shared::Counts::brought, number + 1)) return false;
    const int me = shared_->rank;
    const auto [start, bytes] = everyone_reduces_all_ ? Span{0, bytes_of(reduced_)} : part(me, reduced_);
    for (int rank = 0; rank < shared_->size; ++rank) {
      check(rank, number);
      const bool is_here = rank == me && !everyone_reduces_all_;
      shared_->rows[rank] = (is_here ? data(reduced_) : shared_->slot(rank, number)) + start;
    }
    char* result = (everyone_reduces_all_ ? data(reduced_) : shared_->slot(me, number)) + start;
    row_.combine(result, shared_->rows.data(), shared_->size, bytes / row_.width);
    shared_->counts(shared_->rank).reduced.store(number + 1, std::memory_order_release);
    ++reduced_;
    return true;
  }

  bool take() {
    const auto number = first_ + taken_;
    if (taken_ == reduced_) return false;
    if (!everyone_reduces_all_ && !shared_->have_all(&Shared::Counts::reduced, number + 1)) return false;
    for (int rank = 0; rank < shared_->size && !everyone_reduces_all_; ++rank) {
      const auto [start, bytes] = part(rank, taken_);
      std::memcpy(data(taken_) + start, shared_->slot(rank, number) + start, bytes);
    }
    shared_->counts(shared_->rank).taken.store(number + 1, std::memory_order_release);
    ++taken_;
    return true;
  }

  void check(int rank, uint64_t number) const {
    const auto kind = shared_->counts(rank).kinds[number % Shared::kSlots].load(std::memory_order_relaxed);
    TORCH_CHECK(
        kind == row_.kind, "rank ", rank, " of the group reduces ", kind >> 16, " elements, this one ", row_.kind >> 16,
        ", or another dtype or operation");
  }

  Shared* shared_;
  Row row_;
  size_t bytes_;
  uint64_t chunks_, first_ = 0;
  bool everyone_reduces_all_;
  uint64_t brought_ = 0, reduced_ = 0, taken_ = 0;
};
}  // namespace manycpu
