// Collectives among the ranks of one host, through a small shared memory that stays in the caches. Of each chunk a
// rank writes to the memory what it sends, reduces what is its own, and reads what it receives. While a rank waits
// for others it works on the next chunks. It reads and writes its tensors once, as a copy would.
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
  static constexpr size_t kChunk = 64 << 10;  // bytes, that a core copies in microseconds
  // Chunks in progress. They fit into a core's own cache, and last while another program has the core of a peer.
  static constexpr size_t kSlots = 16;
  static constexpr int kMostRanks = kChunk / 64;  // a cache line of a chunk for each

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

// Dense elements of a tensor.
struct Span {
  char* data;
  size_t bytes;
};

// What a rank sends and receives: one row for each rank, or a single one.
//
//   sent      received  combine
//   single    each      no       allgather
//   each      single    yes      reduce_scatter
//   each      each      yes      allreduce: each rank reduces its row, and all gather them
//   single    single    yes      allreduce: every rank reduces everything, which for two ranks moves as much data
struct Request {
  std::vector<Span> sent, received;
  size_t width;           // of an element, in bytes
  rows::Combine combine;  // or nullptr
  uint64_t kind;          // below 1 << 16; equal on all ranks that call the same collective

  bool is_for_all() const { return sent.size() == 1; }

  // How many elements a rank sends, as this rank knows it.
  size_t elements_of(int rank) const {
    if (!combine) return received[rank].bytes / width;
    size_t bytes = 0;
    for (const auto& row : sent) bytes += row.bytes;
    return bytes / width;
  }
};

// One collective: `test` does what is possible without waiting, and returns whether it is complete.
class Exchange {
 public:
  Exchange(Shared& shared, Request request)
      : shared_(&shared),
        request_(std::move(request)),
        piece_(request_.is_for_all() ? Shared::kChunk : Shared::kChunk / shared.size / 64 * 64) {
    size_t longest = 0;
    for (const auto* rows : {&request_.sent, &request_.received}) {
      for (const auto& row : *rows) longest = std::max(longest, row.bytes);
    }
    chunks_ = (longest + piece_ - 1) / piece_;
  }

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
  static constexpr int kSteps = 16;  // at most, before other groups have their turn

  bool step() {
    const bool took = take(), reduced = reduce(), brought = bring();
    return took || reduced || brought;
  }

  // What of a row is in a chunk.
  Span part(const Span& row, uint64_t chunk) const {
    const size_t start = std::min(row.bytes, chunk * piece_);
    return {row.data + start, std::min(row.bytes - start, piece_)};
  }

  // Where a rank writes what is for another rank, or that other's result.
  char* place(int of, int other, uint64_t number) const {
    return shared_->slot(of, number) + (request_.is_for_all() ? 0 : other * piece_);
  }

  static void copy(char* to, const char* from, size_t bytes) {
    if (bytes && to != from) std::memcpy(to, from, bytes);
  }

  bool bring() {
    const auto number = first_ + brought_;
    if (brought_ == chunks_) return false;
    // Wait until all ranks have read the chunk that was in this slot.
    if (number >= Shared::kSlots && !shared_->have_all(&Shared::Counts::taken, number - Shared::kSlots + 1)) return false;
    const int me = shared_->rank;
    for (size_t k = 0; k < request_.sent.size(); ++k) {
      const bool is_own = !request_.is_for_all() && k == static_cast<size_t>(me);
      const auto [data, bytes] = part(request_.sent[k], brought_);
      if (!is_own) copy(place(me, k, number), data, bytes);
      if (!request_.combine) copy(part(request_.received[me], brought_).data, data, bytes);
    }
    auto& counts = shared_->counts(me);
    counts.kinds[number % Shared::kSlots].store(kind_of(me), std::memory_order_relaxed);
    counts.brought.store(number + 1, std::memory_order_release);
    ++brought_;
    return true;
  }

  bool reduce() {
    const auto number = first_ + reduced_;
    if (!request_.combine || reduced_ == brought_ || !shared_->have_all(&Shared::Counts::brought, number + 1)) return false;
    const int me = shared_->rank;
    const auto own = part(request_.is_for_all() ? request_.sent[0] : request_.sent[me], reduced_);
    for (int rank = 0; rank < shared_->size; ++rank) {
      check(rank, number);
      const bool is_here = rank == me && !request_.is_for_all();
      shared_->rows[rank] = is_here ? own.data : place(rank, me, number);
    }
    const bool is_kept = request_.received.size() == 1;
    char* result = is_kept ? part(request_.received[0], reduced_).data : place(me, me, number);
    request_.combine(result, shared_->rows.data(), shared_->size, own.bytes / request_.width);
    shared_->counts(me).reduced.store(number + 1, std::memory_order_release);
    ++reduced_;
    return true;
  }

  bool take() {
    const auto number = first_ + taken_;
    if (taken_ == (request_.combine ? reduced_ : brought_)) return false;
    if (request_.received.size() > 1) {
      const auto written = request_.combine ? &Shared::Counts::reduced : &Shared::Counts::brought;
      if (!shared_->have_all(written, number + 1)) return false;
      for (int rank = 0; rank < shared_->size; ++rank) {
        if (!request_.combine) check(rank, number);
        if (!request_.combine && rank == shared_->rank) continue;
        const auto [data, bytes] = part(request_.received[rank], taken_);
        copy(data, place(rank, rank, number), bytes);
      }
    }
    shared_->counts(shared_->rank).taken.store(number + 1, std::memory_order_release);
    ++taken_;
    return true;
  }

  uint64_t kind_of(int rank) const { return request_.elements_of(rank) << 16 | request_.kind; }

  void check(int rank, uint64_t number) const {
    const auto kind = shared_->counts(rank).kinds[number % Shared::kSlots].load(std::memory_order_relaxed);
    const auto expected = kind_of(rank);
    TORCH_CHECK(
        kind == expected, "rank ", rank, " of the group has ", kind >> 16, " elements where this one expects ", expected >> 16,
        ", or it calls another collective, or has another dtype or operation");
  }

  Shared* shared_;
  Request request_;
  size_t piece_;  // bytes of each row in a chunk
  uint64_t chunks_, first_ = 0;
  uint64_t brought_ = 0, reduced_ = 0, taken_ = 0;
};
}  // namespace manycpu
