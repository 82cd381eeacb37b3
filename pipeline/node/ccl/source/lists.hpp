// Collectives over lists of tensors: a list is sent as one row of elements.
#pragma once
#include <algorithm>
#include "plans.hpp"

namespace manycpu::plans {
inline Counts counts_of(const Tensors& tensors) {
  Counts counts;
  for (const auto& tensor : tensors) counts.push_back(tensor.numel());
  return counts;
}

inline at::Tensor empty_row(const Tensors& tensors, const at::Tensor& like) {
  int64_t sum = 0;
  for (const auto& tensor : tensors) sum += tensor.numel();
  return at::empty({sum}, like.options());
}

inline void spread(const at::Tensor& row, const Tensors& tensors) {
  int64_t start = 0;
  for (const auto& tensor : tensors) {
    tensor.copy_(row.narrow(0, start, tensor.numel()).view(tensor.sizes()));
    start += tensor.numel();
  }
}

inline at::Tensor joined(const Tensors& tensors, const at::Tensor& like) {
  auto row = empty_row(tensors, like);
  int64_t start = 0;
  for (const auto& tensor : tensors) {
    row.narrow(0, start, tensor.numel()).copy_(tensor.flatten());
    start += tensor.numel();
  }
  return row;
}

inline void one_for_each_rank(const Tensors& list, int size, const at::Tensor& like, const char* what) {
  TORCH_CHECK(
      list.size() == static_cast<size_t>(size), "ccl: ", what, " takes a list with one tensor for each of ", size,
      " ranks, not ", list.size());
  for (const auto& tensor : list) checked(tensor), alike(tensor, like);
}

inline bool are_dense(const Tensors& tensors) {
  return std::all_of(tensors.begin(), tensors.end(), [](const auto& tensor) { return tensor.is_contiguous(); });
}

struct Rows {
  at::Tensor in, out;
};

inline Plan allgather(const Tensors& outs, const at::Tensor& in, int rank, int size) {
  one_for_each_rank(outs, size, in, "allgather");
  TORCH_CHECK(
      outs[rank].numel() == in.numel(), "ccl: the output of allgather for this rank has ", outs[rank].numel(),
      " elements, its input ", in.numel());
  auto rows = std::make_shared<Rows>();
  return {
      outs,
      bytes_of(outs),
      [=](Comm& comm, Events& events) {
        rows->in = row_of_values(in);
        if (comm.shared && are_dense(outs)) return gather_in_memory(*comm.shared, events, rows->in, spans(outs));
        rows->out = empty_row(outs, in);
        gather_rows(comm, events, rows->in, rows->out, counts_of(outs));
      },
      [=] {
        if (rows->out.defined()) spread(rows->out, outs);
      }};
}

// Several tensors of each rank; `outs` has one list for each rank.
inline Plan allgather_several(const std::vector<Tensors>& outs, const Tensors& ins, int rank, int size) {
  TORCH_CHECK(
      outs.size() == static_cast<size_t>(size), "ccl: all_gather_coalesced takes a list of tensors for each of ", size,
      " ranks, not ", outs.size());
  checked(ins);
  Tensors all;
  for (const auto& list : outs) {
    TORCH_CHECK(
        list.size() == ins.size(), "ccl: all_gather_coalesced takes as many outputs of each rank as inputs, not ",
        list.size(), " and ", ins.size());
    all.insert(all.end(), list.begin(), list.end());
  }
  std::vector<Plan> parts;
  for (size_t k = 0; k < ins.size(); ++k) {
    Tensors of_each_rank;
    for (const auto& list : outs) of_each_rank.push_back(list[k]);
    parts.push_back(allgather(of_each_rank, ins[k], rank, size));
  }
  return together(all, std::move(parts));
}

inline Plan reduce_scatter(const at::Tensor& out, const Tensors& ins, const ReduceOp& op, int size) {
  one_for_each_rank(ins, size, out, "reduce_scatter");
  for (const auto& in : ins) {
    TORCH_CHECK(
        in.numel() == out.numel(), "ccl: reduce_scatter takes inputs as large as its output of ", out.numel(),
        " elements, not ", in.numel());
  }
  checked(op, out);
  TORCH_CHECK(!is_bitwise(op), "ccl: reduce_scatter has no bitwise reductions");
  auto reduction = std::make_shared<Reduction>();
  return {
      {out},
      bytes_of(ins),
      [=](Comm& comm, Events& events) {
        reduction->out = row(out);
        const bool is_direct = comm.shared && are_dense(ins) && combination(out.scalar_type(), op);
        if (!is_direct) reduction->in = joined(ins, out);
        const auto rows = is_direct ? spans(ins) : spans(reduction->in, counts_of(ins));
        start_reduce_scatter(comm, events, *reduction, rows, op);
      },
      [=] { reduction->finish(op, size, out); }};
}

inline Plan alltoall(const Tensors& outs, const Tensors& ins, int size) {
  checked(outs), checked(ins);
  one_for_each_rank(outs, size, ins[0], "alltoall");
  one_for_each_rank(ins, size, ins[0], "alltoall");
  auto rows = std::make_shared<Rows>();
  return {
      outs,
      bytes_of(outs),
      [=](Comm& comm, Events& events) {
        *rows = {joined(ins, ins[0]), empty_row(outs, ins[0])};
        exchange_rows(comm, events, rows->in, counts_of(ins), rows->out, counts_of(outs));
      },
      [=] { spread(rows->out, outs); }};
}

// How many elements go to each rank: as many rows of the first dimension as `sizes` says, or equal shares.
inline Counts splits(const at::Tensor& tensor, const std::vector<int64_t>& sizes, int size) {
  const int64_t first = tensor.dim() ? tensor.size(0) : 1;
  if (sizes.empty()) {
    TORCH_CHECK(first % size == 0, "ccl: alltoall cannot share ", first, " rows evenly among ", size, " ranks");
    return Counts(size, tensor.numel() / size);
  }
  TORCH_CHECK(sizes.size() == static_cast<size_t>(size), "ccl: alltoall takes a split for each of ", size, " ranks");
  int64_t sum = 0;
  Counts counts;
  for (const auto rows : sizes) {
    sum += rows;
    counts.push_back(first ? rows * (tensor.numel() / first) : 0);
  }
  TORCH_CHECK(sum == first, "ccl: the splits of alltoall add up to ", sum, ", the tensor has ", first, " rows");
  return counts;
}

inline Plan alltoall_rows(const at::Tensor& out, const at::Tensor& in, const Counts& received, const Counts& sent) {
  checked(out), checked(in), alike(out, in);
  auto rows = std::make_shared<Rows>();
  return {
      {out},
      out.nbytes(),
      [=](Comm& comm, Events& events) {
        *rows = {row_of_values(in), row(out)};
        exchange_rows(comm, events, rows->in, sent, rows->out, received);
      },
      [=] { write_back(out, rows->out); }};
}

// Every rank sends to the root only.
inline Plan gather(const Tensors& outs, const at::Tensor& in, int root, int rank, int size) {
  const bool mine = rank == root;
  if (mine) one_for_each_rank(outs, size, in, "gather");
  TORCH_CHECK(mine || outs.empty(), "ccl: only the root of a gather gives a list to gather into");
  Counts sent(size, 0), received = mine ? counts_of(outs) : Counts(size, 0);
  sent[root] = in.numel();
  auto rows = std::make_shared<Rows>();
  return {
      outs,
      in.nbytes() * size,
      [=](Comm& comm, Events& events) {
        *rows = {row_of_values(in), empty_row(outs, in)};
        exchange_rows(comm, events, rows->in, sent, rows->out, received);
      },
      [=] { spread(rows->out, outs); }};
}

// Only the root sends.
inline Plan scatter(const at::Tensor& out, const Tensors& ins, int root, int rank, int size) {
  const bool mine = rank == root;
  if (mine) one_for_each_rank(ins, size, out, "scatter");
  TORCH_CHECK(mine || ins.empty(), "ccl: only the root of a scatter gives a list to scatter");
  Counts received(size, 0), sent = mine ? counts_of(ins) : Counts(size, 0);
  received[root] = out.numel();
  auto rows = std::make_shared<Rows>();
  return {
      {out},
      out.nbytes() * size,
      [=](Comm& comm, Events& events) {
        *rows = {joined(ins, out), row(out)};
        exchange_rows(comm, events, rows->in, sent, rows->out, received);
      },
      [=] { write_back(out, rows->out); }};
}

inline Plan barrier() {
  auto token = at::zeros({1}, at::kByte);
  // oneCCL's own barrier blocks its caller, which then would not notice that a peer has died.
  return allreduce({token}, ReduceOp(ReduceOp::MAX), 1);
}
}  // namespace manycpu::plans
