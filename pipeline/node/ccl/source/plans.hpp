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

inline Span span(const at::Tensor& row) { return {static_cast<char*>(row.data_ptr()), row.nbytes()}; }

inline std::vector<Span> spans(const Tensors& rows) {
  std::vector<Span> all;
  for (const auto& row : rows) all.push_back(span(row));
  return all;
}

// The rows of a tensor that holds one after the other.
inline std::vector<Span> spans(const at::Tensor& rows, const Counts& counts) {
  std::vector<Span> all;
  auto* next = static_cast<char*>(rows.data_ptr());
  for (const auto count : counts) {
    all.push_back({next, count * rows.element_size()});
    next += all.back().bytes;
  }
  return all;
}

enum class Collective : uint64_t { allreduce, reduce_scatter, allgather };

// What the ranks compare before they use what another one has written.
inline uint64_t kind(Collective what, at::ScalarType type, const ReduceOp& op = ReduceOp::SUM) {
  return static_cast<uint64_t>(type) << 8 | static_cast<uint64_t>(what) << 4 | static_cast<uint64_t>(op.op_);
}

inline void gather_in_memory(Shared& shared, Events& events, const at::Tensor& in, std::vector<Span> rows) {
  const auto width = static_cast<size_t>(in.element_size());
  const auto name = kind(Collective::allgather, in.scalar_type());
  events.push_back(Exchange(shared, {{span(in)}, std::move(rows), width, nullptr, name}));
}

inline void gather_rows(Comm& comm, Events& events, const at::Tensor& in, const at::Tensor& out, const Counts& counts) {
  if (comm.shared) return gather_in_memory(*comm.shared, events, in, spans(out, counts));
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

// A reduction from its start to its end.
struct Reduction {
  at::Tensor in, out;
  bool is_sum = false;  // of which the average is still to be taken

  void finish(const ReduceOp& op, int size, const at::Tensor& result) const {
    if (is_sum && op == ReduceOp::AVG && out.numel()) out.div_(size);
    write_back(result, out);
  }
};

// Equal shares of whole cache lines; the last ones may be shorter, or empty.
inline std::vector<Span> shares(const Span& row, int size) {
  const size_t lines = (row.bytes + 63) / 64, each = (lines + size - 1) / size * 64;
  std::vector<Span> all;
  for (int rank = 0; rank < size; ++rank) {
    const size_t start = std::min(row.bytes, rank * each);
    all.push_back({row.data + start, std::min(row.bytes - start, each)});
  }
  return all;
}

inline void start_allreduce(Comm& comm, Events& events, Reduction& reduction, const ReduceOp& op) {
  constexpr size_t kSmall = 4096;  // bytes, that every rank reduces by itself
  const auto& row = reduction.out;
  const auto type = row.scalar_type();
  const auto combine = comm.shared ? combination(type, op) : nullptr;
  reduction.is_sum = !combine;
  if (!combine) {
    const auto how = manycpu::reduction(op, type);
    events.push_back(ccl::allreduce(row.data_ptr(), row.data_ptr(), row.numel(), arithmetic(type), how, comm));
    return;
  }
  const auto whole = span(row);
  const bool is_whole = comm.shared->size == 2 || whole.bytes <= kSmall;
  auto rows = is_whole ? std::vector<Span>{whole} : shares(whole, comm.shared->size);
  const auto width = static_cast<size_t>(row.element_size());
  events.push_back(Exchange(*comm.shared, {rows, rows, width, combine, kind(Collective::allreduce, type, op)}));
}

inline Plan allreduce_one(const at::Tensor& given, const ReduceOp& op, int size) {
  const auto tensor = as_real(given);
  checked(op, tensor);
  if (is_bitwise(op)) return bitwise(tensor, op, size, true);
  auto reduction = std::make_shared<Reduction>();
  return {
      {tensor},
      tensor.nbytes(),
      [=](Comm& comm, Events& events) {
        reduction->out = row_of_values(tensor);
        if (tensor.numel()) start_allreduce(comm, events, *reduction, op);
      },
      [=] { reduction->finish(op, size, tensor); }};
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
  auto reduction = std::make_shared<Reduction>();
  return {
      {given},
      tensor.nbytes(),
      [=](Comm& comm, Events& events) {
        auto& [in, out, is_sum] = *reduction;
        in = row_of_values(tensor), out = mine ? in : at::empty_like(in), is_sum = true;
        const auto type = tensor.scalar_type();
        const auto how = manycpu::reduction(op, type);
        if (!tensor.numel()) return;
        events.push_back(ccl::reduce(address(in), address(out), tensor.numel(), arithmetic(type), how, root, comm));
      },
      [=] {
        if (mine) reduction->finish(op, size, tensor);
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

// Reduce rows, one for each rank, that are one tensor or several.
inline void start_reduce_scatter(
    Comm& comm, Events& events, Reduction& reduction, const std::vector<Span>& rows, const ReduceOp& op) {
  const auto& out = reduction.out;
  const auto type = out.scalar_type();
  const auto combine = comm.shared ? combination(type, op) : nullptr;
  reduction.is_sum = !combine;
  if (!out.numel()) return;
  if (combine) {
    const auto width = static_cast<size_t>(out.element_size());
    const auto name = kind(Collective::reduce_scatter, type, op);
    events.push_back(Exchange(*comm.shared, {rows, {span(out)}, width, combine, name}));
    return;
  }
  const auto how = manycpu::reduction(op, type);
  events.push_back(ccl::reduce_scatter(rows[0].data, address(out), out.numel(), arithmetic(type), how, comm));
}

inline Plan reduce_scatter_from(const at::Tensor& out, const at::Tensor& in, const ReduceOp& op, int size) {
  checked(out), checked(in), alike(out, in), checked(op, out);
  TORCH_CHECK(!is_bitwise(op), "ccl: reduce_scatter has no bitwise reductions");
  TORCH_CHECK(
      in.numel() == out.numel() * size, "ccl: the input of reduce_scatter has ", in.numel(), " elements and needs ",
      out.numel() * size, ", the output's ", out.numel(), " for each of ", size, " ranks");
  auto reduction = std::make_shared<Reduction>();
  return {
      {out},
      in.nbytes(),
      [=](Comm& comm, Events& events) {
        reduction->in = row_of_values(in), reduction->out = row(out);
        const auto rows = spans(reduction->in, Counts(size, out.numel()));
        start_reduce_scatter(comm, events, *reduction, rows, op);
      },
      [=] { reduction->finish(op, size, out); }};
}
}  // namespace plans
}  // namespace manycpu
