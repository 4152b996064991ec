// judge_formats.cpp - exercise 15: six tensors, and the best way to store each of them; exercise 16: tensors
// of a layer, and how each of them is used.
#include <array>

#include "comparison.h"

using namespace judge;

// --- 15 ---

namespace {

// Tensors A to F of the exercise, of 64 tokens and 256 features.
std::array<Floats, 6> tensors_to_store() {
    std::mt19937 random(1);
    std::normal_distribution<float> normal;
    std::uniform_real_distribution<float> uniform;
    std::array<Floats, 6> tensors;
    for (int i = 0; i < 64 * 256; i++) {
        const int token = i / 256, feature = i % 256;
        auto of_powers = [&](float powers) {
            return std::copysign(std::exp2(-powers * uniform(random)), normal(random));
        };
        tensors[0].push_back(normal(random));
        tensors[1].push_back(of_powers(20));
        tensors[2].push_back(of_powers(10));
        tensors[3].push_back(normal(random) * (feature == 39 ? 1e3f : 1));
        tensors[4].push_back(normal(random) * std::exp2(-20.0f * float(token) / 64));
        tensors[5].push_back(normal(random) * (feature == 39 ? 1e5f : 1));
    }
    return tensors;
}

// The RMS of the relative errors of x when it is stored so.
double error_of(const Floats& x, const judge::Choice& choice) {
    const Format format = format_of(*choice.format);
    const TensorFormat tensor_format{format, choice.groups ? PER_1x16 : PER_TENSOR,
                                     choice.groups ? Format::BF16 : Format::FP32};
    const Floats stored = dequantize(reference::quantize(x.data(), 64, 256, tensor_format));
    double sum = 0;
    for (size_t i = 0; i < x.size(); i++) sum += std::pow(stored[i] / double(x[i]) - 1, 2);
    return std::sqrt(sum / double(x.size()));
}

std::string name_of(const judge::Choice& choice) {
    const std::string format = choice.format->mantissa == 3 ? "E4M3" : "E5M2";
    return format + (choice.groups ? " in groups" : " with one scale");
}

std::string why(const judge::Choice& mine, const judge::Choice& best) {
    const bool same_format = mine.format->mantissa == best.format->mantissa;
    if (same_format && mine.groups)
        return "Groups win little here. Do values differ in size from group to group, or inside each group?";
    if (same_format) return "Groups win here: what is large shares its scale with all that is small.";
    if (best.format->mantissa == 2)
        return "In E4M3 values below 1 / 28,672 of the amax of their scale block lose precision: how many "
               "are there?";
    return "E4M3 has a bit more precision, and with the right scales its range suffices here.";
}

}  // namespace

int judge::choose(const Choice (&choices)[6]) {
    const std::array<Floats, 6> tensors = tensors_to_store();
    const Choice all[] = {{&E4M3, false}, {&E4M3, true}, {&E5M2, false}, {&E5M2, true}};
    const bool chosen = std::any_of(choices, choices + 6, [](const Choice& c) { return c.format; });
    if (!chosen) {
        std::cout << "exercise 15: nothing is computed yet: write your choices.\n";
        return 1;
    }
    for (int t = 0; t < 6; t++) {
        const Choice& mine = choices[t];
        Choice best = all[0];
        std::ostringstream errors;
        for (const Choice& way : all) {
            const double error = error_of(tensors[t], way);
            if (error < 0.9 * error_of(tensors[t], best)) best = way;
            errors << "\n  " << name_of(way) << ": " << std::setprecision(3) << 100 * error << "%";
        }
        const std::string tensor = std::string("tensor ") + char('A' + t);
        if (!mine.format) {
            std::cout << "exercise 15: " << tensor << " has no format yet.\n";
            return 1;
        }
        if (mine.format->mantissa == best.format->mantissa && mine.groups == best.groups) continue;
        std::cout << "exercise 15: " << tensor << " is stored better in another way than " << name_of(mine)
                  << "." << hint_line(15, why(mine, best) + " RMS of the relative errors:" + errors.str());
        return 1;
    }
    std::cout
        << "exercise 15: passed, each tensor is stored in the best way. E5M2 has the range for F, but where "
           "outliers are smaller, as in D, it loses a bit of every value.\n";
    return 0;
}

// --- 16 ---

namespace {

struct Answer {
    Use use;
    const char* why_saved;
    const char* why_operand;
};
constexpr Answer ANSWERS[7] = {
    {{SavedAs::GROUPS, OperandIn::NO},
     "Backward of a norm needs its input.",
     "A norm reads it, and no GEMM does."},
    {{SavedAs::NO, OperandIn::E4M3},
     "It follows from the norm's input by a few operations for each element.",
     "It is x of the gate and up projection, in fprop and in wgrad."},
    {{SavedAs::BF16, OperandIn::NO},
     "Attention's backward reads it, and COAT leaves attention in BF16.",
     "Attention multiplies it, which is no linear layer."},
    {{SavedAs::BF16, OperandIn::E4M3},
     "To compute it again costs all of attention, and COAT leaves attention in BF16.",
     "It is x of the output projection."},
    {{SavedAs::GROUPS, OperandIn::NO},
     "Backward of SiLU(gate) x up needs its inputs.",
     "SiLU(gate) x up reads it, and no GEMM does."},
    {{SavedAs::NO, OperandIn::E4M3},
     "It follows from gate and up by a few operations for each element.",
     "It is x of the down projection, in fprop and in wgrad."},
    {{SavedAs::NO, OperandIn::E5M2},
     "Backward makes it, and uses it at once.",
     "It is g of the gate and up projection: COAT's format of gradients."}};

}  // namespace

int judge::saved(const Use (&uses)[7]) {
    const bool decided = std::any_of(uses, uses + 7, [](const Use& use) {
        return use.saved != SavedAs::UNKNOWN || use.operand != OperandIn::UNKNOWN;
    });
    if (!decided) {
        std::cout << "exercise 16: nothing is computed yet: write your answers.\n";
        return 1;
    }
    for (int t = 0; t < 7; t++) {
        const auto& [use, why_saved, why_operand] = ANSWERS[t];
        const bool saved = uses[t].saved == use.saved;
        if (saved && uses[t].operand == use.operand) continue;
        std::cout << "exercise 16: tensor " << char('A' + t) << ": look again at "
                  << (saved ? "operand." : "saved.") << hint_line(16, saved ? why_operand : why_saved);
        return 1;
    }
    std::cout
        << "exercise 16: passed, all seven tensors are used so. Groups hold inputs of norms and of SiLU, for "
           "which small values count. A GEMM multiplies their outputs; these have one scale, because then it "
           "multiplies each finished sum by the scale once.\n";
    return 0;
}
