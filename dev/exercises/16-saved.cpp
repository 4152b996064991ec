// 16 - What is saved, and what is multiplied? (lesson 6; about 10 minutes)
//
// These are tensors of one layer of Llama, trained with --recipe coat. Say of each, on paper:
//   saved     does forward keep it until backward has come to its layer? NO, in BF16, or in GROUPS: E4M3
//             codes with a scale for each 1x16 group
//   operand   does a GEMM of a linear layer multiply it, in forward or in backward? NO, in E4M3, or in E5M2,
//             both with one scale for the tensor
//
// Find out: why is no tensor both in groups and an operand?
#include "judge.h"

using judge::OperandIn, judge::SavedAs;

const judge::Use USES[7] = {
    {.saved = SavedAs::UNKNOWN,
     .operand = OperandIn::UNKNOWN},  // A: the input of norm 2, the residual stream
    {.saved = SavedAs::UNKNOWN, .operand = OperandIn::UNKNOWN},  // B: the output of norm 2
    {.saved = SavedAs::UNKNOWN, .operand = OperandIn::UNKNOWN},  // C: q, k and v, after RoPE
    {.saved = SavedAs::UNKNOWN, .operand = OperandIn::UNKNOWN},  // D: the output of attention
    {.saved = SavedAs::UNKNOWN, .operand = OperandIn::UNKNOWN},  // E: gate and up
    {.saved = SavedAs::UNKNOWN, .operand = OperandIn::UNKNOWN},  // F: SiLU(gate) x up
    {.saved = SavedAs::UNKNOWN, .operand = OperandIn::UNKNOWN},  // G: the gradient of gate and up
};

int main() { return judge::saved(USES); }
