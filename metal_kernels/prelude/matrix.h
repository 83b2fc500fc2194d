// simdgroup_matrix: 8x8 matrices spread over the 32 lanes, two neighbouring columns of a row each.
// Shared by the CUDA prelude and the emulator; bodies load, store and multiply, and never compute
// with a lane's own elements, whose place differs from platform to platform.
//
// Needs before it, in namespace metal:
//   MatrixPlace matrix_place()                 this lane's row and first column
//   uint matrix_lane(uint row, uint column)    the lane that holds an element
//   matrix_multiply_add(d, a, b, c)            d = a b + c on the element pairs
#pragma once

namespace metal {

template <class T, int Columns = 8, int Rows = 8>
struct simdgroup_matrix {
  static_assert(Columns == 8 && Rows == 8, "simdgroup_matrix: only 8 x 8");
  vec<T, 2> elements;

  simdgroup_matrix() = default;
  HUSKY_FUNC explicit simdgroup_matrix(T diagonal) {
    const MatrixPlace at = matrix_place();
    elements[0] = at.row == at.column ? diagonal : T(0);
    elements[1] = at.row == at.column + 1 ? diagonal : T(0);
  }
};
using simdgroup_float8x8 = simdgroup_matrix<float>;
using simdgroup_half8x8 = simdgroup_matrix<half>;
using simdgroup_bfloat8x8 = simdgroup_matrix<bfloat>;

template <class T, int Columns, int Rows>
HUSKY_FUNC simdgroup_matrix<T, Columns, Rows> make_filled_simdgroup_matrix(T value) {
  simdgroup_matrix<T, Columns, Rows> result;
  result.elements = vec<T, 2>(value);
  return result;
}

// The index of element (row, column) in memory; origin is (column, row), as in Metal.
HUSKY_FUNC ulong matrix_index(uint row, uint column, ulong stride, ulong2 origin, bool transpose) {
  return transpose ? (origin.x + row) + (origin.y + column) * stride
                   : (origin.y + row) * stride + origin.x + column;
}

template <class T, class Source>
HUSKY_FUNC void simdgroup_load(simdgroup_matrix<T>& matrix, const Source* source,
                               ulong stride = 8, ulong2 origin = ulong2(0ul),
                               bool transpose = false) {
  const MatrixPlace at = matrix_place();
  for (uint i = 0; i < 2; i++)
    matrix.elements[i] =
        T(source[matrix_index(at.row, at.column + i, stride, origin, transpose)]);
}

template <class T, class Target>
HUSKY_FUNC void simdgroup_store(simdgroup_matrix<T> matrix, Target* target, ulong stride = 8,
                                ulong2 origin = ulong2(0ul), bool transpose = false) {
  const MatrixPlace at = matrix_place();
  for (uint i = 0; i < 2; i++)
    target[matrix_index(at.row, at.column + i, stride, origin, transpose)] =
        Target(matrix.elements[i]);
}

template <class D, class A, class B, class C>
HUSKY_FUNC void simdgroup_multiply_accumulate(simdgroup_matrix<D>& d, simdgroup_matrix<A> a,
                                              simdgroup_matrix<B> b, simdgroup_matrix<C> c) {
  matrix_multiply_add(d.elements, a.elements, b.elements, c.elements);
}

template <class D, class A, class B>
HUSKY_FUNC void simdgroup_multiply(simdgroup_matrix<D>& d, simdgroup_matrix<A> a,
                                   simdgroup_matrix<B> b) {
  matrix_multiply_add(d.elements, a.elements, b.elements, vec<D, 2>(D(0)));
}

}  // namespace metal
