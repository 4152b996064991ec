// capstone.h - the model of exercise 12: y = linear(swiglu(linear(norm(x)))), and what a step of it is given.
#pragma once
#include "judge.h"

// A matrix of parameters with its moments of AdamW; 128 parameters share max and k of each moment.
struct Weight {
    Matrix value;
    std::vector<uint8_t> m_codes, v_codes;
    std::vector<float> m_max, m_k, v_max, v_k;
};

struct SmallModel {
    Matrix x, target;  // (64, 32) both: the data, the same in every step
    Weight norm;       // (1, 32)
    Weight gate_up;    // (64, 32): rows of gate, then of up
    Weight down;       // (32, 32)
};

struct Groups {  // a matrix in 1x16 groups
    int rows, cols;
    std::vector<uint8_t> codes;
    std::vector<float> scales;
};

namespace given {

using Quantizer = void(int, int, const float*, uint8_t*, float*);
Groups groups(const Matrix& x, const judge::Function<Quantizer>& quantize_to_groups);
Matrix norm_forward(const Groups& x, const Weight& weight);
Matrix swiglu_forward(const Groups& gate_up);                   // (rows, cols / 2)
double loss(const Matrix& y, const Matrix& target, Matrix& g);  // writes g, the gradient of y
void update(Weight& w, const std::vector<float>& gradient, int t, const judge::Function<judge::AdamW>& adamw);

}  // namespace given

namespace judge {

int training(const Function<double(SmallModel&, int)>& step);  // step(model, t), t from 1

}  // namespace judge
