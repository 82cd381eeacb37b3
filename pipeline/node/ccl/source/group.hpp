// The backend that torch.distributed calls: each collective is planned, and posted to the group's line.
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
  // Messages between two ranks (send, recv) have tags, which oneCCL has not: they go by `messages`.
  Group(int rank, int size, Milliseconds timeout, std::shared_ptr<Line> line, BackendPtr messages)
      : Backend(rank, size), timeout_(timeout), line_(std::move(line)), messages_(std::move(messages)) {
    Engine::get().add(line_);
  }
  ~Group() override { shutdown(); }

  const std::string getBackendName() const override { return "ccl"; }
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return line_->number(); }

  void setTimeout(Milliseconds timeout) override { timeout_ = timeout; }

  void shutdown() override { Engine::get().remove(line_); }

  void abort() override {
    line_->ask_to_abort();
    Engine::get().wake();
  }

  Returned allreduce(Tensors& tensors, const c10d::AllreduceOptions& o) override {
    return post(c10d::OpType::ALLREDUCE, "allreduce", plans::allreduce({single(tensors)}, o.reduceOp, size_), o);
  }
  Returned allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& o) override {
    return post(
        c10d::OpType::ALLREDUCE_COALESCED, "allreduce_coalesced", plans::allreduce(tensors, o.reduceOp, size_), o);
  }
  Returned reduce(Tensors& tensors, const c10d::ReduceOptions& o) override {
    return post(
        c10d::OpType::REDUCE, "reduce", plans::reduce(single(tensors), o.reduceOp, root(o), rank_, size_), o);
  }
  Returned broadcast(Tensors& tensors, const c10d::BroadcastOptions& o) override {
    return post(c10d::OpType::BROADCAST, "broadcast", plans::broadcast(single(tensors), root(o), rank_), o);
  }
  Returned allgather(std::vector<Tensors>& outs, Tensors& ins, const c10d::AllgatherOptions& o) override {
    return post(
        c10d::OpType::ALLGATHER, "allgather", plans::allgather(list(outs), single(ins), rank_, size_), o);
  }
  Returned _allgather_base(at::Tensor& out, at::Tensor& in, const c10d::AllgatherOptions& o) override {
    return post(c10d::OpType::_ALLGATHER_BASE, "allgather_into_tensor", plans::allgather_into(out, in, size_), o);
  }
  Returned allgather_into_tensor_coalesced(Tensors& outs, Tensors& ins, const c10d::AllgatherOptions& o) override {
    same_length(outs, ins);
    std::vector<Plan> parts;
    for (size_t k = 0; k < ins.size(); ++k) parts.push_back(plans::allgather_into(outs[k], ins[k], size_));
    return post(c10d::OpType::COALESCED, "allgather_coalesced", plans::together(outs, std::move(parts)), o);
  }
  Returned reduce_scatter(Tensors& outs, std::vector<Tensors>& ins, const c10d::ReduceScatterOptions& o) override {
    return post(
        c10d::OpType::REDUCE_SCATTER, "reduce_scatter",
        plans::reduce_scatter(single(outs), list(ins), o.reduceOp, size_), o);
  }
  Returned _reduce_scatter_base(at::Tensor& out, at::Tensor& in, const c10d::ReduceScatterOptions& o) override {
    return post(
        c10d::OpType::_REDUCE_SCATTER_BASE, "reduce_scatter_tensor",
        plans::reduce_scatter_from(out, in, o.reduceOp, size_), o);
  }
  Returned reduce_scatter_tensor_coalesced(Tensors& outs, Tensors& ins, const c10d::ReduceScatterOptions& o) override {
    same_length(outs, ins);
    std::vector<Plan> parts;
    for (size_t k = 0; k < ins.size(); ++k) {
      parts.push_back(plans::reduce_scatter_from(outs[k], ins[k], o.reduceOp, size_));
    }
    return post(c10d::OpType::COALESCED, "reduce_scatter_coalesced", plans::together(outs, std::move(parts)), o);
  }
  Returned alltoall_base(
      at::Tensor& out, at::Tensor& in, std::vector<int64_t>& outs, std::vector<int64_t>& ins,
      const c10d::AllToAllOptions& o) override {
    const auto received = plans::splits(out, outs, size_), sent = plans::splits(in, ins, size_);
    return post(c10d::OpType::ALLTOALL_BASE, "alltoall", plans::alltoall_rows(out, in, received, sent), o);
  }
  Returned alltoall(Tensors& outs, Tensors& ins, const c10d::AllToAllOptions& o) override {
    return post(c10d::OpType::ALLTOALL, "alltoall", plans::alltoall(outs, ins, size_), o);
  }
  Returned gather(std::vector<Tensors>& outs, Tensors& ins, const c10d::GatherOptions& o) override {
    const auto into = outs.empty() ? Tensors{} : list(outs);
    return post(c10d::OpType::GATHER, "gather", plans::gather(into, single(ins), root(o), rank_, size_), o);
  }
  Returned scatter(Tensors& outs, std::vector<Tensors>& ins, const c10d::ScatterOptions& o) override {
    const auto from = ins.empty() ? Tensors{} : list(ins);
    return post(c10d::OpType::SCATTER, "scatter", plans::scatter(single(outs), from, root(o), rank_, size_), o);
  }
  Returned barrier(const c10d::BarrierOptions& o) override {
    return post(c10d::OpType::BARRIER, "barrier", plans::barrier(), o);
  }
  Returned send(Tensors& tensors, int to, int tag) override {
    Tensors dense{single(tensors).contiguous()};
    return messages().send(dense, to, tag);
  }
  Returned recv(Tensors& tensors, int from, int tag) override {
    return messages().recv(tensors_of_message(tensors), from, tag);
  }
  Returned recvAnysource(Tensors& tensors, int tag) override {
    return messages().recvAnysource(tensors_of_message(tensors), tag);
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

  c10d::Backend& messages() {
    TORCH_CHECK(messages_, "ccl: a group of one rank has nobody to send to");
    return *messages_;
  }

  template <typename Options>
  Returned post(c10d::OpType type, const char* name, Plan plan, const Options& options) {
    TORCH_CHECK(getpid() == process_, "ccl: a forked process cannot use the groups of its parent");
    const auto timeout = options.timeout > Milliseconds::zero() ? options.timeout : timeout_.load();
    const auto work = line_->post(type, name, std::move(plan), timeout);
    if (is_awaited(options)) {
      Engine::get().drive([&] { return work->isCompleted(); }, Clock::time_point::max());
    } else {
      Engine::get().wake();
    }
    return work;
  }

  // Whether the caller does nothing else until it is complete, as torch tells for what is not `async_op`.
  template <typename Options>
  static bool is_awaited(const Options& options) {
    if constexpr (requires { options.asyncOp; }) return !options.asyncOp;
    return false;
  }

  const pid_t process_ = getpid();
  std::atomic<Milliseconds> timeout_;
  const std::shared_ptr<Line> line_;
  const BackendPtr messages_;
};
}  // namespace manycpu
