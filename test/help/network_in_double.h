// network_in_double.h - the class Network of reference/network.h in double: forward and backward of the whole
// model, in which nothing is rounded. Tests compare its gradients with finite differences.
//
// reference/network.h is compiled here once more, in another namespace, with `double` wherever it says
// `float`. Its operators are templates. Its quantizers are replaced by functions that keep the values. All
// that it includes has been included before, so only its own text changes.
#pragma once
#include <array>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "../../common/model.h"
#include "../../reference/operators.h"
#include "../../reference/quantize.h"

namespace coat::in_double {

using namespace reference;

struct StoredMatrix {
    std::vector<double> values;
    double amax = 0;
};
inline StoredMatrix quantize(const double* x, int64_t rows, int64_t cols, const TensorFormat&,
                             const QuantizeOptions&) {
    return {.values = std::vector<double>(x, x + rows * cols)};
}
inline std::vector<double> dequantize(const StoredMatrix& stored) { return stored.values; }

struct GemmOperand {
    std::vector<double> values;
    double amax;
};
inline GemmOperand gemm_operand(const std::vector<double>& x, int64_t, int64_t, const TensorFormat&, SumAlong,
                                const QuantizeOptions&) {
    return {.values = x, .amax = 0};
}
inline double round_to(Format, double x) { return x; }
inline double compute_amax(const double*, int64_t) { return 0; }  // only delayed scaling reads it
inline void add_scaled(int64_t n, double factor, const double* x, double* y) {
    reference::add_scaled(n, factor, x, y);
}

}  // namespace coat::in_double

#define float double
#define reference in_double
#include "../../reference/network.h"
#undef float
#undef reference

namespace coat::test {

// The mean loss of one micro-batch, with the weights param_values. If `gradients` is not null, it gets the
// gradients of this loss, by parameter.
inline double loss_in_double(const ModelConfig& config, int64_t B, int64_t T,
                             const std::vector<std::vector<double>>& param_values, const int32_t* tokens,
                             const int32_t* targets, std::vector<std::vector<double>>* gradients) {
    const Recipe& recipe = find_row(recipes(), "fp32", "--recipe");
    const OptimizerFormats& optimizer = find_row(optimizers(), "fp32", "--optimizer");
    in_double::Network network({config, recipe, optimizer, B, T});
    network.param_values = param_values;
    const double loss_weight = 1.0 / divisor_of_mean(targets, B * T);
    const double loss =
        network.run_micro_batch(tokens, targets, loss_weight, gradients != nullptr) * loss_weight;
    if (gradients) *gradients = network.gradients;
    return loss;
}

}  // namespace coat::test
