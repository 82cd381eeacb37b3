// The backend that torch.distributed calls: it plans each collective, and posts it to the group's queue.
#pragma once
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <torch/csrc/utils/pybind.h>
#include "engine.hpp"
#include "lists.hpp"

namespace manycpu {
using Returned = c10::intrusive_ptr<c10d::Work>;
using BackendPtr = c10::intrusive_ptr<c10d::Backend>;

class Group : public c10d::Backend {
 public:
  // gloo, over the same ranks, does what oneCCL cannot: messages between two ranks (they have tags), sums of sparse
  // tensors, and the barrier that names the ranks that are late.
  Group(int rank, int size, Milliseconds timeout, std::shared_ptr<Line> line, BackendPtr gloo)
      : Backend(rank, size), timeout_(timeout), line_(std::move(line)), gloo_(std::move(gloo)) {
    Engine::get().add(line_);
  }
  ~Group() override {
    shutdown();
    if (!is_here()) gloo_.release();  // a forked process has no threads of it, which its destructor would join
  }

  const std::string getBackendName() const override { return "ccl"; }
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return line_->number(); }

  void setTimeout(Milliseconds timeout) override {
    timeout_ = timeout;
    gloo_->setTimeout(timeout);
  }

  void shutdown() override { Engine::get().remove(line_); }

  void abort() override {
    line_->ask_to_abort();
    Engine::get().wake();
  }

  Returned allreduce(Tensors& tensors, const c10d::AllreduceOptions& o) override {
    if (!tensors.empty() && tensors[0].is_sparse()) return allreduce_sparse(tensors, o);
    return post(c10d::OpType::ALLREDUCE, "all_reduce", tensors, plans::allreduce({single(tensors)}, o.reduceOp, size_), o);
  }
  Returned allreduce_sparse(Tensors& tensors, const c10d::AllreduceOptions& o) override {
    return beside().allreduce(tensors, with_timeout(o));
  }
  Returned allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& o) override {
    return post(
        c10d::OpType::ALLREDUCE_COALESCED, "all_reduce_coalesced", tensors,
        plans::allreduce(tensors, o.reduceOp, size_), o);
  }
  Returned reduce(Tensors& tensors, const c10d::ReduceOptions& o) override {
    return post(
        c10d::OpType::REDUCE, "reduce", tensors, plans::reduce(single(tensors), o.reduceOp, root(o), rank_, size_), o);
  }
  Returned broadcast(Tensors& tensors, const c10d::BroadcastOptions& o) override {
    return post(c10d::OpType::BROADCAST, "broadcast", tensors, plans::broadcast(single(tensors), root(o), rank_), o);
  }
  Returned allgather(std::vector<Tensors>& outs, Tensors& ins, const c10d::AllgatherOptions& o) override {
    return post(
        c10d::OpType::ALLGATHER, "all_gather", ins, plans::allgather(list(outs), single(ins), rank_, size_), o);
  }
  Returned allgather_coalesced(std::vector<Tensors>& outs, Tensors& ins, const c10d::AllgatherOptions& o) override {
    return post(
        c10d::OpType::ALLGATHER_COALESCED, "all_gather_coalesced", ins,
        plans::allgather_several(outs, ins, rank_, size_), o);
  }
  Returned _allgather_base(at::Tensor& out, at::Tensor& in, const c10d::AllgatherOptions& o) override {
    return post(
        c10d::OpType::_ALLGATHER_BASE, "all_gather_into_tensor", {in}, plans::allgather_into(out, in, size_), o);
  }
  Returned allgather_into_tensor_coalesced(Tensors& outs, Tensors& ins, const c10d::AllgatherOptions& o) override {
    same_length(outs, ins);
    std::vector<Plan> parts;
    for (size_t k = 0; k < ins.size(); ++k) parts.push_back(plans::allgather_into(outs[k], ins[k], size_));
    return post(
        c10d::OpType::COALESCED, "all_gather_into_tensor_coalesced", ins, plans::together(outs, std::move(parts)), o);
  }
  Returned reduce_scatter(Tensors& outs, std::vector<Tensors>& ins, const c10d::ReduceScatterOptions& o) override {
    return post(
        c10d::OpType::REDUCE_SCATTER, "reduce_scatter", list(ins),
        plans::reduce_scatter(single(outs), list(ins), o.reduceOp, size_), o);
  }
  Returned _reduce_scatter_base(at::Tensor& out, at::Tensor& in, const c10d::ReduceScatterOptions& o) override {
    return post(
        c10d::OpType::_REDUCE_SCATTER_BASE, "reduce_scatter_tensor", {in},
        plans::reduce_scatter_from(out, in, o.reduceOp, size_), o);
  }
  Returned reduce_scatter_tensor_coalesced(Tensors& outs, Tensors& ins, const c10d::ReduceScatterOptions& o) override {
    same_length(outs, ins);
    std::vector<Plan> parts;
    for (size_t k = 0; k < ins.size(); ++k) {
      parts.push_back(plans::reduce_scatter_from(outs[k], ins[k], o.reduceOp, size_));
    }
    return post(
        c10d::OpType::COALESCED, "reduce_scatter_tensor_coalesced", ins, plans::together(outs, std::move(parts)), o);
  }
  Returned alltoall_base(
      at::Tensor& out, at::Tensor& in, std::vector<int64_t>& outs, std::vector<int64_t>& ins,
      const c10d::AllToAllOptions& o) override {
    const auto received = plans::splits(out, outs, size_), sent = plans::splits(in, ins, size_);
    return post(
        c10d::OpType::ALLTOALL_BASE, "all_to_all_single", {in}, plans::alltoall_rows(out, in, received, sent), o);
  }
  Returned alltoall(Tensors& outs, Tensors& ins, const c10d::AllToAllOptions& o) override {
    return post(c10d::OpType::ALLTOALL, "all_to_all", ins, plans::alltoall(outs, ins, size_), o);
  }
  Returned gather(std::vector<Tensors>& outs, Tensors& ins, const c10d::GatherOptions& o) override {
    const auto into = outs.empty() ? Tensors{} : list(outs);
    return post(c10d::OpType::GATHER, "gather", ins, plans::gather(into, single(ins), root(o), rank_, size_), o);
  }
  Returned scatter(Tensors& outs, std::vector<Tensors>& ins, const c10d::ScatterOptions& o) override {
    const auto from = ins.empty() ? Tensors{} : list(ins);
    return post(c10d::OpType::SCATTER, "scatter", from, plans::scatter(single(outs), from, root(o), rank_, size_), o);
  }
  Returned barrier(const c10d::BarrierOptions& o) override {
    return post(c10d::OpType::BARRIER, "barrier", {}, plans::barrier(), o);
  }
  void monitoredBarrier(const c10d::BarrierOptions& o, bool wait_all_ranks) override {
    beside().monitoredBarrier(o, wait_all_ranks);
  }
  Returned send(Tensors& tensors, int to, int tag) override {
    Tensors dense{single(tensors).contiguous()};
    return beside().send(dense, to, tag);
  }
  Returned recv(Tensors& tensors, int from, int tag) override {
    return beside().recv(tensors_of_message(tensors), from, tag);
  }
  Returned recvAnysource(Tensors& tensors, int tag) override {
    return beside().recvAnysource(tensors_of_message(tensors), tag);
  }

 private:
  template <typename Options>
  int root(const Options& options) const {
    TORCH_CHECK(
        options.rootRank >= 0 && options.rootRank < size_, "ccl: there is no rank ", options.rootRank,
        " in a group of ", size_);
    return static_cast<int>(options.rootRank);
  }

  static const Tensors& list(const std::vector<Tensors>& lists) {
    TORCH_CHECK(lists.size() == 1, "ccl: takes one list of tensors for each rank, not ", lists.size());
    return lists[0];
  }

  static void same_length(const Tensors& outs, const Tensors& ins) {
    TORCH_CHECK(
        outs.size() == ins.size(), "ccl: takes as many outputs as inputs, not ", outs.size(), " and ", ins.size());
  }

  static Tensors& tensors_of_message(Tensors& tensors) {
    single(tensors);
    return tensors;
  }

  c10d::Backend& beside() {
    only_here();
    return *gloo_;
  }

  bool is_here() const { return getpid() == process_; }

  void only_here() const {
    TORCH_CHECK(is_here(), "ccl: a forked process cannot use the groups of its parent");
  }

  template <typename Options>
  Options with_timeout(Options options) const {
    if (options.timeout <= Milliseconds::zero()) options.timeout = timeout_;
    return options;
  }

  template <typename Options>
  Returned post(c10d::OpType type, const char* name, const Tensors& ins, Plan plan, const Options& options) {
    only_here();
    const auto work = line_->post(type, name, ins, std::move(plan), with_timeout(options).timeout);
    if (is_awaited(options)) {
      Engine::get().drive([&] { return work->isCompleted(); }, Clock::time_point::max());
    } else {
      Engine::get().wake();
    }
    return work;
  }

  // Whether the caller waits for it at once: torch says so for collectives without `async_op`.
  template <typename Options>
  static bool is_awaited(const Options& options) {
    if constexpr (requires { options.asyncOp; }) return !options.asyncOp;
    return false;
  }

  const pid_t process_ = getpid();
  std::atomic<Milliseconds> timeout_;
  const std::shared_ptr<Line> line_;
  BackendPtr gloo_;
};
}  // namespace manycpu
