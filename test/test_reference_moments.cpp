// test_reference_moments.cpp - how reference.cpp stores the moments of the optimizer: every format, with one
// scale per group or per tensor.
#include <doctest/doctest.h>

#include <algorithm>

#include "../reference.h"
#include "moments.h"
#include "oracle.h"
#include "random.h"
#include "tiny.h"

using namespace coat;
using namespace coat::test;
using namespace coat::reference;
using namespace coat::test::moments;

TEST_CASE("Moment: a part that starts at a group has the codes of the whole; all values are zero at first") {
    FRESH_RANDOM(rng);
    const int64_t n = 5 * MOMENT_GROUP + 19;
    const std::vector<float> x = magnitudes(rng.normals<float>(n));
    for (Format f : {Format::F32, Format::BF16, Format::F16, Format::E4M3, Format::E5M2})
        for (bool expand : {false, true}) {
            Moment whole;
            whole.init(f, expand, n);
            std::vector<float> a(x.size(), -1), b(x.size(), -1);
            whole.load(a.data());
            CHECK(norm(a) == 0);
            whole.store(x.data(), true);
            whole.load(a.data());
            std::vector<uint8_t> codes;  // of the parts, as ranks store them
            for (int64_t first = 0; first < n; first += 2 * MOMENT_GROUP) {
                Moment part;
                part.init(f, expand, std::min<int64_t>(2 * MOMENT_GROUP, n - first));
                part.store(x.data() + first, true);
                part.load(b.data() + first);
                codes.insert(codes.end(), part.codes.begin(), part.codes.end());
            }
            CHECK(a == b);
            CHECK(whole.codes == codes);
            CHECK(relative_error(a, x) <= std::ldexp(1.0, -info(f).mantissa - 1));
            if (f == Format::F32) CHECK(a == x);
        }
}

namespace {

// A moment of FP8-LM: one scale for all elements, value = code * max / FMAX.
Moment per_tensor(Format f, bool positive, const std::vector<float>& x, QuantStats* stats = nullptr) {
    Moment moment;
    moment.init(f, false, int64_t(x.size()), 0);
    moment.store(x.data(), positive, stats);
    return moment;
}

std::vector<float> loaded(const Moment& moment, size_t n) {
    std::vector<float> x(n, -7);
    moment.load(x.data());
    return x;
}

}  // namespace

TEST_CASE("Moment: per-tensor scaling keeps the error bound of the format and counts flushed values") {
    FRESH_RANDOM(rng);
    for (Format f : {Format::F16, Format::E4M3, Format::E5M2})
        for (int64_t n : LENGTHS)
            for (const Distribution& d : distributions()) {
                INFO(std::string(info(f).name), ", ", n, " elements, ", d.name);
                const std::vector<float> x = sample(d, rng, n);
                QuantStats stats;
                const Moment moment = per_tensor(f, false, x, &stats);
                const std::vector<float> values = loaded(moment, x.size());
                REQUIRE((moment.max.size() == 1 && moment.k.empty()));
                REQUIRE(moment.max[0] == amax(x.data(), n));
                const double s = double(scale_of({f}, moment.max[0]));
                int64_t flushed = 0;
                for (size_t i = 0; i < x.size(); i++) {
                    const double a = std::fabs(double(x[i]));
                    REQUIRE(std::fabs(double(values[i]) - double(x[i])) <= error_bound(f, a, s));
                    if (x[i] != 0 && a < s * info(f).min * 0.499) REQUIRE(values[i] == 0);
                    flushed += x[i] != 0 && values[i] == 0;
                }
                if (s * info(f).min > 0x1p-126)
                    REQUIRE(stats.flushed == flushed);  // below it the smallest code may not be an FP32 value
                REQUIRE(stats.elements == n);
            }
}

TEST_CASE("Moment: per-tensor scaling starts at zero, and stores its own values again with the same codes") {
    FRESH_RANDOM(rng);
    const int64_t n = 5 * MOMENT_GROUP + 19;
    std::vector<float> x = magnitudes(rng.normals<float>(n));
    x[700 % n] = 300;
    x[3] = 1e-11f;
    for (Format f : {Format::F32, Format::BF16, Format::F16, Format::E4M3})
        for (bool positive : {false, true}) {
            const Moment whole = per_tensor(f, positive, x);
            Moment zero;
            zero.init(f, false, n, 0);
            CHECK(norm(loaded(zero, x.size())) == 0);
            const std::vector<float> values = loaded(whole, x.size());
            const Moment again = per_tensor(f, positive, values);
            CHECK((whole.codes == again.codes && whole.max == again.max));
            CHECK(values == loaded(again, x.size()));
            if (is_scaled(f))
                CHECK((values[3] > 0) == positive);  // 1e-11 / 300 is below the range of either format
        }
}

TEST_CASE("Moment: FP16 reaches 2^-41 of a tensor's largest second moment, E4M3 per tensor 2^-18") {
    const std::pair<Format, int> reach[] = {{Format::F16, 41}, {Format::E4M3, 18}};
    for (const auto& [f, power] : reach) {
        std::vector<float> v(300, 0.0f);
        v[0] = 3.0f;
        v[1] = 3.0f * std::ldexp(1.0f, -power + 1), v[2] = 3.0f * std::ldexp(1.0f, -power - 1);
        QuantStats stats;
        const std::vector<float> values = loaded(per_tensor(f, false, v, &stats), v.size());
        INFO(std::string(info(f).name));
        CHECK(values[0] == doctest::Approx(3.0f).epsilon(1e-6));
        CHECK(values[1] > 0);
        CHECK(values[2] == 0);
        CHECK(stats.flushed == 1);
    }
}

TEST_CASE("optimizer_tensors: the tensors of the state follow formats and granularity") {
    const ModelConfig config = tiny_config(LLAMA, true);
    auto shape_of = [&](const OptimizerFormat& o, const std::string& name) -> std::string {
        Setup s = tiny_setup(config, "bf16", "fp32");
        s.optimizer = o;
        for (const StateTensor& t : optimizer_tensors(s))
            if (t.name == name) return std::string(t.dtype) + " " + std::to_string(t.size());
        return "none";
    };
    const OptimizerFormat fp8lm = find_row(optimizers(), "fp8lm", "");
    const std::string n = std::to_string(64 * 64), groups = std::to_string(64 * 64 / MOMENT_GROUP);
    CHECK(shape_of(fp8lm, "layers.0.attention_out.m") == "F8_E4M3 " + n);
    CHECK(shape_of(fp8lm, "layers.0.attention_out.v") == "F16 " + n);
    for (const char* scale : {".m.max", ".v.max"})
        CHECK(shape_of(fp8lm, std::string("layers.0.attention_out") + scale) == "F32 1");
    for (const char* none : {".m.k", ".v.k"})
        CHECK(shape_of(fp8lm, std::string("layers.0.attention_out") + none) == "none");
    CHECK(shape_of(fp8lm, "layers.0.norm1.weight.v") == "F32 64");  // norm weights and biases stay in FP32
    CHECK(shape_of(fp8lm, "layers.0.norm1.weight.v.max") == "none");
    // FP16 in groups of 128, which no row of the table has
    const OptimizerFormat mixed{"coat", Format::E4M3, Format::F16, true, ""};
    CHECK(shape_of(mixed, "layers.0.attention_out.m.k") == "F32 " + groups);
    CHECK(shape_of(mixed, "layers.0.attention_out.v.max") == "F32 " + groups);
    CHECK(shape_of(mixed, "layers.0.attention_out.v.k") == "none");
}

TEST_CASE("fp8lm optimizer: trains, saves its scale in the state, and reports what is flushed") {
    const Setup setup = tiny_setup(tiny_config(LLAMA, true), "bf16", "fp8lm");
    Training training(setup), exact(tiny_setup(tiny_config(LLAMA, true), "bf16", "fp32"));
    double loss = 0, expected = 0, first = 0;
    for (int64_t i = 0; i < count(60, 10); i++) {
        loss = training.step().loss, expected = exact.step().loss;
        if (i == 0) first = loss;
    }
    CHECK(std::fabs(loss - expected) < 0.02 * expected);
    CHECK(loss < first);
    const int64_t n = 64 * 64;
    const std::string name = "layers.0.attention_out";
    const float max = read_as<float>(*training.model, name + ".v.max", 1)[0];
    const std::vector<uint16_t> v = read_as<uint16_t>(*training.model, name + ".v", n);
    const uint16_t top = *std::max_element(v.begin(), v.end());
    CHECK(top == 0x7BFF);  // the largest element has the largest code
    CHECK(max > 0);
    const QuantReport report = training.model->quantization(training.tokens.data(), training.targets.data());
    const QuantStats& m = report.kinds[static_cast<int>(Kind::Moment1)];
    const QuantStats& second = report.kinds[static_cast<int>(Kind::Moment2)];
    int64_t elements = 0;
    for (const Param& p : parameters(setup.config)) elements += p.role.fp8_state ? p.size() : 0;
    CHECK((m.elements == elements && second.elements == elements));
    CHECK(m.flushed > 0);  // E4M3 per tensor reaches 2^-18 of the largest value
    CHECK(second.flushed < m.flushed);
    CHECK(second.snr_db() > m.snr_db());
    CHECK((report.k_m.empty() && report.k_v.empty()));
}
