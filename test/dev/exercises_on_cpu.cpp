// exercises_on_cpu.cpp - exercises 13 and 14 without nvcc: the CPU runs their kernels
// (dev/exercises/kernel_on_cpu.h). What the judge says of an empty kernel, of mistakes, some of which a GPU
// forgives now and then, and of solutions.
#include "../help/exercises.h"
#include "exercise_kernels.cuh"

namespace cpu13 {
#include "../../dev/exercises/13-quantize-transpose.cu"
}
namespace cpu14 {
#include "../../dev/exercises/14-adamw.cu"
}

using namespace coat::test;

TEST_CASE("exercises 13 and 14: the CPU runs an empty kernel and typical mistakes and a solution") {
    judge_kernels(cpu13::quantize_transpose, cpu14::adamw);
}

TEST_CASE("exercises 13 and 14: on the CPU a missing barrier is always seen") {
    transposes("a __syncthreads() is missing", transpose<Transpose::NoBarrier>);
    transposes("a thread waits in __syncthreads()", transpose<Transpose::SomeEndBeforeTheBarrier>);
    transposes("a thread writes outside an array: codes[1], but the size of codes is 1.",
               transpose<Transpose::PastTheEnd>);
    updates("a __syncthreads() is missing", adamw<Reduction::NoBarrierInRounds>);
    updates("a __syncthreads() is missing", adamw<Reduction::NoBarrierAfterIt>);
}
