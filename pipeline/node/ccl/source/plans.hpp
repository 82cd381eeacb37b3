// The plan of each collective: what to start when its turn comes, and what to do once that is complete.
//
// A plan reads and copies nothing before its turn: an earlier collective of the group may still write there.
#pragma once
#include <functional>
#include <variant>
#include "shared.hpp"
#include "types.hpp"

namespace manycpu {
using Events = std::vector<std::variant<ccl::event, Exchange>>;
using Counts = ccl::vector_class<size_t>;

// How a group communicates: by oneCCL and, if all ranks are on one host, by shared memory.
struct Comm {
  ccl::communicator ccl;
  std::unique_ptr<Shared> shared;

  operator const ccl::communicator&() const { return ccl; }
};

struct Plan {
  Tensors outputs;
  size_t bytes = 0;
  std::function<void(Comm&, Events&)> start;
  std::function<void()> finish = [] {};
};

namespace plans {
// The address of the elements; oneCCL never gets a null pointer, even for a tensor without elements.
inline void* address(const at::Tensor& tensor) {
  static char nothing[64];
  return tensor.numel() ? tensor.data_ptr() : nothing;
}

// A contiguous tensor to receive into: the tensor itself, or a new one if it is strided.
inline at::Tensor row(const at::Tensor& tensor) {
  return tensor.is_contiguous() ? tensor : at::empty(tensor.sizes(), tensor.options());
}

inline at::Tensor row_of_values(const at::Tensor& tensor) { return tensor.contiguous(); }

inline void write_back(const at::Tensor& tensor, const at::Tensor& row) {
  if (!tensor.is_same(row)) tensor.copy_(row.view(tensor.sizes()));
}

inline size_t bytes_of(const Tensors& tensors) {
  size_t sum = 0;
  for (const auto& tensor : tensors) sum += tensor.nbytes();
  return sum;
}

inline at::Tensor as_real(const at::Tensor& tensor) {
  return tensor.is_complex() ? at::view_as_real(tensor) : tensor;
}

inline void average(const ReduceOp& op, const at::Tensor& tensor, int size) {
  if (op == ReduceOp::AVG && tensor.numel()) tensor.div_(size);
}

inline void gather_rows(Comm& comm, Events& events, const at::Tensor& in, const at::Tensor& out, const Counts& counts) {
  const auto [type, factor] = wire(in);
  Counts scaled(counts);
  for (auto& count : scaled) count *= factor;
  if (out.numel()) {
    events.push_back(ccl::allgatherv(address(in), in.numel() * factor, address(out), scaled, type, comm));
  }
}

inline void exchange_rows(
    Comm& comm, Events& events, const at::Tensor& in, const Counts& sent, const at::Tensor& out, const Counts& received) {
  const auto [type, factor] = wire(in);
  Counts sends(sent), receives(received);
  for (auto& count : sends) count *= factor;
  for (auto& count : receives) count *= factor;
  events.push_back(ccl::alltoallv(address(in), sends, address(out), receives, type, comm));
}

inline at::Tensor combined(const ReduceOp& op, const at::Tensor& rows) {
  auto result = rows[0].clone();
  for (int64_t k = 1; k < rows.size(0); ++k) {
    if (op == ReduceOp::BAND) result.bitwise_and_(rows[k]);
    if (op == ReduceOp::BOR) result.bitwise_or_(rows[k]);
    if (op == ReduceOp::BXOR) result.bitwise_xor_(rows[k]);
  }
  return result;
}

inline Plan bitwise(const at::Tensor& tensor, const ReduceOp& op, int size, bool keep) {
  auto values = std::make_shared<at::Tensor>();
  auto rows = std::make_shared<at::Tensor>();
  return {
      {tensor},
      tensor.nbytes(),
      [=](Comm& comm, Events& events) {
        *values = row_of_values(tensor);
        *rows = at::empty({size, values->numel()}, values->options());
        gather_rows(comm, events, *values, *rows, Counts(size, values->numel()));
      },
      [=] {
        if (keep) tensor.copy_(combined(op, *rows).view(tensor.sizes()));
      }};
}

inline void start_allreduce(Comm& comm, Events& events, const at::Tensor& row, const ReduceOp& op) {
  const auto type = row.scalar_type();
  const auto how = reduction(op, type);
  const size_t count = row.numel();
  const auto combine = comm.shared ? combination(type, how) : nullptr;
  if (!combine) {
    events.push_back(ccl::allreduce(row.data_ptr(), row.data_ptr(), count, arithmetic(type), how, comm));
    return;
  }
  const auto kind = count << 16 | static_cast<uint64_t>(type) << 8 | static_cast<uint64_t>(how);
  auto* data = static_cast<char*>(row.data_ptr());
  events.push_back(Exchange(*comm.shared, {data, count, static_cast<size_t>(row.element_size()), combine, kind}));
}

inline Plan allreduce_one(const at::Tensor& given, const ReduceOp& op, int size) {
  const auto tensor = as_real(given);
  checked(op, tensor);
  if (is_bitwise(op)) return bitwise(tensor, op, size, true);
  auto buffer = std::make_shared<at::Tensor>();
  return {
      {tensor},
      tensor.nbytes(),
      [=](Comm& comm, Events& events) {
        *buffer = row_of_values(tensor);
        if (tensor.numel()) start_allreduce(comm, events, *buffer, op);
      },
      [=] {
        average(op, *buffer, size);
        write_back(tensor, *buffer);
      }};
}

// Several plans as one: all start together, and it is complete when the last one is.
inline Plan together(const Tensors& outputs, std::vector<Plan> parts) {
  auto shared = std::make_shared<std::vector<Plan>>(std::move(parts));
  return {
      outputs,
      bytes_of(outputs),
      [=](Comm& comm, Events& events) {
        for (auto& part : *shared) part.start(comm, events);
      },
      [=] {
        for (auto& part : *shared) part.finish();
      }};
}

inline Plan allreduce(const Tensors& tensors, const ReduceOp& op, int size) {
  checked(tensors);
  std::vector<Plan> parts;
  for (const auto& tensor : tensors) parts.push_back(allreduce_one(tensor, op, size));
  return together(tensors, std::move(parts));
}

inline Plan reduce(const at::Tensor& given, const ReduceOp& op, int root, int rank, int size) {
  const auto tensor = as_real(given);
  checked(op, tensor);
  const bool mine = rank == root;
  if (is_bitwise(op)) return bitwise(tensor, op, size, mine);
  auto buffer = std::make_shared<at::Tensor>();
  auto result = std::make_shared<at::Tensor>();
  return {
      {given},
      tensor.nbytes(),
      [=](Comm& comm, Events& events) {
        *buffer = row_of_values(tensor);
        *result = mine ? *buffer : at::empty_like(*buffer);
        const auto type = tensor.scalar_type();
        if (!tensor.numel()) return;
        events.push_back(ccl::reduce(
            address(*buffer), address(*result), tensor.numel(), arithmetic(type), reduction(op, type), root, comm));
      },
      [=] {
        if (!mine) return;
        average(op, *result, size);
        write_back(tensor, *result);
      }};
}

inline Plan broadcast(const at::Tensor& tensor, int root, int rank) {
  auto buffer = std::make_shared<at::Tensor>();
  return {
      {tensor},
      tensor.nbytes(),
      [=](Comm& comm, Events& events) {
        *buffer = rank == root ? row_of_values(tensor) : row(tensor);
        const auto [type, factor] = wire(tensor);
        if (tensor.numel()) {
          events.push_back(ccl::broadcast(address(*buffer), tensor.numel() * factor, type, root, comm));
        }
      },
      [=] {
        if (rank != root) write_back(tensor, *buffer);
      }};
}

inline Plan allgather_into(const at::Tensor& out, const at::Tensor& in, int size) {
  checked(out), checked(in), alike(out, in);
  TORCH_CHECK(
      out.numel() == in.numel() * size, "ccl: the output of allgather has ", out.numel(), " elements and needs ",
      in.numel() * size, ", the input's ", in.numel(), " for each of ", size, " ranks");
  auto buffers = std::make_shared<std::pair<at::Tensor, at::Tensor>>();
  return {
      {out},
      out.nbytes(),
      [=](Comm& comm, Events& events) {
        *buffers = {row_of_values(in), row(out)};
        gather_rows(comm, events, buffers->first, buffers->second, Counts(size, in.numel()));
      },
      [=] { write_back(out, buffers->second); }};
}

inline Plan reduce_scatter_from(const at::Tensor& out, const at::Tensor& in, const ReduceOp& op, int size) {
  checked(out), checked(in), alike(out, in), checked(op, out);
  TORCH_CHECK(!is_bitwise(op), "ccl: reduce_scatter has no bitwise reductions");
  TORCH_CHECK(
      in.numel() == out.numel() * size, "ccl: the input of reduce_scatter has ", in.numel(), " elements and needs ",
      out.numel() * size, ", the output's ", out.numel(), " for each of ", size, " ranks");
  auto buffers = std::make_shared<std::pair<at::Tensor, at::Tensor>>();
  return {
      {out},
      in.nbytes(),
      [=](Comm& comm, Events& events) {
        *buffers = {row_of_values(in), row(out)};
        const auto type = out.scalar_type();
        if (!out.numel()) return;
        events.push_back(ccl::reduce_scatter(
            address(buffers->first), address(buffers->second), out.numel(), arithmetic(type), reduction(op, type), comm));
      },
      [=] {
        average(op, buffers->second, size);
        write_back(out, buffers->second);
      }};
}
}  // namespace plans
}  // namespace manycpu
