// Map torch's element types and reductions to oneCCL's, and check tensors.
#pragma once
#include <torch/csrc/distributed/c10d/Types.hpp>
#include <ATen/ATen.h>
#include <oneapi/ccl.hpp>
#include "rows.hpp"

namespace manycpu {
using c10d::ReduceOp;
using Tensors = std::vector<at::Tensor>;

inline const at::Tensor& checked(const at::Tensor& tensor) {
  TORCH_CHECK(
      tensor.device().is_cpu(), "ccl: works on CPU tensors; this one is on ", tensor.device(),
      ". Move it with .cpu(), or train on the CPU");
  TORCH_CHECK(tensor.layout() == at::kStrided, "ccl: works on dense tensors, and adds up sparse ones in all_reduce; this one is ",
      tensor.layout());
  return tensor;
}

inline void checked(const Tensors& tensors) {
  TORCH_CHECK(!tensors.empty(), "ccl: there is no tensor in the list");
  for (const auto& tensor : tensors) checked(tensor);
}

inline const at::Tensor& single(const Tensors& tensors) {
  TORCH_CHECK(tensors.size() == 1, "ccl: takes one tensor for each rank, not ", tensors.size());
  return checked(tensors[0]);
}

inline void alike(const at::Tensor& a, const at::Tensor& b) {
  TORCH_CHECK(
      a.scalar_type() == b.scalar_type(), "ccl: tensors of one call must be of one dtype, not ",
      a.scalar_type(), " and ", b.scalar_type());
}

// The type in which elements are added and compared.
inline ccl::datatype arithmetic(at::ScalarType type) {
  switch (type) {
    case at::kFloat: return ccl::datatype::float32;
    case at::kDouble: return ccl::datatype::float64;
    case at::kBFloat16: return ccl::datatype::bfloat16;
    case at::kHalf: return ccl::datatype::float16;
    case at::kLong: return ccl::datatype::int64;
    case at::kInt: return ccl::datatype::int32;
    case at::kShort: return ccl::datatype::int16;
    case at::kChar: return ccl::datatype::int8;
    case at::kByte:
    case at::kBool: return ccl::datatype::uint8;
    default: TORCH_CHECK(false, "ccl: cannot reduce tensors of dtype ", type);
  }
}

// Sending needs no arithmetic: elements of any dtype are sent as integers of their size.
struct Wire {
  ccl::datatype type;
  size_t factor;  // elements on the wire for each element of the tensor
};

inline Wire wire(const at::Tensor& tensor) {
  switch (tensor.element_size()) {
    case 1: return {ccl::datatype::int8, 1};
    case 2: return {ccl::datatype::int16, 1};
    case 4: return {ccl::datatype::int32, 1};
    case 8: return {ccl::datatype::int64, 1};
    default: return {ccl::datatype::int8, static_cast<size_t>(tensor.element_size())};
  }
}

// oneCCL has no bitwise reductions: the tensors are gathered, and reduced on every rank.
inline bool is_bitwise(const ReduceOp& op) {
  return op == ReduceOp::BAND || op == ReduceOp::BOR || op == ReduceOp::BXOR;
}

// Booleans are bytes of 0 and 1: their sum is "any", their product is "all", as torch has it.
inline ccl::reduction reduction(const ReduceOp& op, at::ScalarType type) {
  const bool truth = type == at::kBool;
  switch (op.op_) {
    case ReduceOp::SUM: return truth ? ccl::reduction::max : ccl::reduction::sum;
    case ReduceOp::AVG:
      TORCH_CHECK(at::isFloatingType(type), "ccl: an average of ", type, " is not defined; take the sum");
      return ccl::reduction::sum;  // divided afterwards
    case ReduceOp::PRODUCT: return truth ? ccl::reduction::min : ccl::reduction::prod;
    case ReduceOp::MIN: return ccl::reduction::min;
    case ReduceOp::MAX: return ccl::reduction::max;
    default: TORCH_CHECK(false, "ccl: has no such reduction; use SUM, AVG, PRODUCT, MIN, MAX, or BAND, BOR, BXOR");
  }
}

template <typename Stored>
rows::Combine combination(const ReduceOp& op) {
  switch (op.op_) {
    case ReduceOp::SUM: return rows::best<Stored, rows::Sum>();
    case ReduceOp::MIN: return rows::best<Stored, rows::Least>();
    case ReduceOp::MAX: return rows::best<Stored, rows::Greatest>();
    case ReduceOp::AVG:
      if constexpr (!std::is_integral_v<Stored>) return rows::best<Stored, rows::Mean>();
      return nullptr;
    default: return nullptr;
  }
}

// How the ranks of one host reduce in shared memory; nullptr: oneCCL reduces, which knows rare types and operations.
inline rows::Combine combination(at::ScalarType type, const ReduceOp& op) {
  switch (type) {
    case at::kFloat: return combination<float>(op);
    case at::kDouble: return combination<double>(op);
    case at::kBFloat16: return combination<rows::Bfloat>(op);
    case at::kHalf: return combination<rows::Half>(op);
    case at::kLong: return combination<int64_t>(op);
    case at::kInt: return combination<int32_t>(op);
    case at::kShort: return combination<int16_t>(op);
    case at::kChar: return combination<int8_t>(op);
    case at::kByte: return combination<uint8_t>(op);
    case at::kBool: return combination<uint8_t>(op == ReduceOp::SUM ? ReduceOp(ReduceOp::MAX) : op);
    default: return nullptr;
  }
}

inline void checked(const ReduceOp& op, const at::Tensor& tensor) {
  if (is_bitwise(op)) {
    TORCH_CHECK(
        at::isIntegralType(tensor.scalar_type(), /*includeBool=*/true), "ccl: bitwise reductions take integers, not ",
        tensor.scalar_type());
    return;
  }
  arithmetic(tensor.scalar_type());
  reduction(op, tensor.scalar_type());
}
}  // namespace manycpu
