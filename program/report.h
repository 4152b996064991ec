// program/report.h - what a run prints and logs (report.cpp). Every rank calls these functions, and rank 0
// alone prints and logs.
#pragma once
#include <array>

#include "run.h"

namespace coat {

// Prints what is good to know before the first step: the model and its formats, the data, and the memory that
// the run takes.
void print_start(const Run& run);
// The settings of the last rank. No rank owns more of a matrix than the last one does (owned() in
// common/ranks.h; of a matrix with a single unit it owns all). So its memory is what is printed.
RunSettings settings_of_last_rank(const Run& run);

// Prints and logs a step, which took `seconds`. The rest of the run will take `seconds_left`, with
// validations, samples and saves. Tokens and floating-point operations a second are those of all ranks.
void print_step(Run& run, const StepResult& result, float lr, double seconds, double seconds_left);
// The floating-point operations of training on one token of a sequence of T:
//   for each weight of a GEMM   2 in forward, 4 in backward. The head counts, the look-up of the embedding
//                               does not
//   for each element of q       6 T: two products with T / 2 keys on average, at 2 operations each. Backward
//                               does twice the operations of forward
double flops_per_token(const ModelConfig& config, int64_t T);

// The steps that were made since this program was started, and the seconds that they took.
struct StepTimes {
    int64_t steps;
    double seconds;                 // all that passed, with validations, samples and saves
    double seconds_of_later_steps;  // all but the first, without validations, samples and saves
};
// Prints and logs the end of a run: the last validation loss, and how fast the steps were.
void print_end(Run& run, double validation, const StepTimes& times);

// The following measure something on validation text (validation.h) and print it. The first two also log it.
double validate_and_report(Run& run);  // the validation loss, which is returned
void report_sample(Run& run);          // a beginning of validation text, and how the model continues it
void report_quantization(Run& run);    // how well FP8 represents each kind of tensor

// Of some numbers (at least one): the smallest, the three quartiles, and the largest.
std::array<float, 5> quartiles(std::vector<float> numbers);

}  // namespace coat
