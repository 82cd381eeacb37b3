// Allreduce among ranks of one host, through a small memory that all of them have mapped and that stays in the
// caches. Of each chunk a rank brings the others' parts, reduces its own, and takes all; or each brings and reduces
// all: of two ranks, for as much goes from one to the other, and of what is small. The next chunks follow while it
// waits for others. Its tensor is read once and written once, which is what a copy of it costs.
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
  static constexpr size_t kChunk = 64 << 10;  // bytes; what is under way has room in a core's own cache
  static constexpr size_t kSlots = 4;         // chunks under way

  // How many chunks a rank has brought, reduced and taken since the group began; and what it was asked for.
  struct Counts {
    alignas(64) std::atomic<uint64_t> brought;
    std::atomic<uint64_t> kinds[kSlots];
    alignas(64) std::atomic<uint64_t> reduced;
    alignas(64) std::atomic<uint64_t> taken;
  };
  static constexpr size_t kPage = 4096;
  static constexpr size_t kPart = kPage + kSlots * kChunk;  // of the memory, for each rank
  static_assert(sizeof(Counts) <= kPage && std::atomic<uint64_t>::is_always_lock_free);

  // Takes a descriptor of zeroes that all ranks have.
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

  // Whether the others seem to do something else, so that the core is better left to what computes.
  bool is_still() const { return Clock::now() > moved + kStill; }

  const int rank, size;
  uint64_t complete = 0;    // chunks of what is over
  Clock::time_point moved;  // when there was last something to do
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
  uint64_t kind;  // of the same value on all ranks that ask for the same
};

// One allreduce: `test` does what can be done without waiting, and tells whether all is done.
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
  static constexpr int kSteps = 16;       // before other groups have their turn
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

  // What a rank reduces of a chunk: whole cache lines.
  Span part(int rank, uint64_t chunk) const {
    const size_t bytes = bytes_of(chunk);
    const size_t lines = (bytes + 63) / 64, each = (lines + shared_->size - 1) / shared_->size * 64;
    const size_t start = std::min(bytes, rank * each);
    return {start, std::min(bytes - start, each)};
  }

  bool bring() {
    const auto number = first_ + brought_;
    if (brought_ == chunks_) return false;
    // Nobody needs any more what was in its place.
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
