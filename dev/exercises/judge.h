// judge.h - what an exercise is compared with. Nothing here needs to be read to solve one.
//
// Each function of `judge` calls the reader's function with random and with nasty inputs, compares the
// results with reference.cpp, and prints "passed", or the first value that differs and a hint. It returns the
// exit code. A mistake is recognized by what the wrong values have in common (judge.cpp, the tables of
// hints).
#pragma once
#include <cmath>
#include <cstdint>
#include <functional>
#include <iostream>
#include <vector>

#pragma GCC diagnostic ignored "-Wunused-parameter"  // of empty bodies

struct Fp8 {  // an 8-bit floating-point format
    int mantissa, bias;
    float max;  // the largest finite value
};
inline constexpr Fp8 E4M3{3, 7, 448.0f}, E5M2{2, 15, 57344.0f};

struct Matrix {  // row-major: element (r, c) is values[r * cols + c]
    int rows, cols;
    std::vector<float> values;
};

struct Moment {  // of groups of 128 parameters: E4M3 codes, and max and k of each group
    uint8_t* codes;
    float *max, *k;
};

struct Step {  // what a step of AdamW has beside its tensors; bias1 = 1 - beta1^t, bias2 = 1 - beta2^t
    float lr, beta1, beta2, eps, decay, bias1, bias2;
};

namespace given {  // functions of earlier exercises, for E4M3, to use in later ones

uint8_t encode(float x);
float decode(uint8_t code);
float to_bf16(float x);  // x rounded to the nearest BF16 value
float expansion_factor(float max, float min);
float expand(float x, float max, float k);
float contract(float y, float max, float k);
Matrix quantized(const Matrix& x, int block_rows, int block_cols);  // x encoded and decoded again
Matrix transposed(const Matrix& x);
Matrix product(const Matrix& a, const Matrix& b);  // a b

}  // namespace given

namespace judge {

template <class F> using Function = std::function<F>;
using Out = std::ostream;

int decode(const Function<float(const Fp8&, uint8_t)>& decode, Out& out = std::cout);
int encode(const Function<uint8_t(const Fp8&, float)>& encode, Out& out = std::cout);
int quantize_tensor(const Function<float(int, const float*, uint8_t*)>& quantize, Out& out = std::cout);
int quantize_groups(const Function<void(int, int, const float*, uint8_t*, float*)>& quantize,
                    Out& out = std::cout);
int amax(const Function<float(int, const float*, float*)>& amax, Out& out = std::cout);
int expansion(const Function<float(float, float)>& expansion_factor,
              const Function<float(float, float, float)>& expand,
              const Function<float(float, float, float)>& contract, Out& out = std::cout);
// number: 7 on the CPU, with one group a call, or 12 on a GPU
int adamw(const Function<void(const Step&, int, const float*, float*, Moment, Moment)>& adamw,
          Out& out = std::cout, int number = 7);
using Linear = void(const Matrix&, const Matrix&, const Matrix&, Matrix&, Matrix&, Matrix&);
int linear(const Function<Linear>& linear, Out& out = std::cout);
using Backward = void(int, int, const uint8_t*, const float*, const float*, const float*, float*, float*);
int norm_backward(const Function<Backward>& backward, Out& out = std::cout);
int swiglu_backward(const Function<void(int, int, const uint8_t*, const float*, const float*, float*)>&,
                    Out& out = std::cout);
int quantize_transpose(const Function<void(int, int, float, const float*, uint8_t*, uint8_t*)>& quantize,
                       Out& out = std::cout);

}  // namespace judge
