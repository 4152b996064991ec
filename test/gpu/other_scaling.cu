// other_scaling.cu - delayed scales (gpu/other_scaling.cu) against the reference. Scales per row and in
// blocks are compared by coat.cu, with all other outputs of quantize().
#include <cmath>

#include "../../gpu/gradients.cuh"
#include "../help/gpu.h"
#include "../help/random.h"

using namespace coat;
using namespace coat::test;
using gpu::AmaxAndScale;

GPU_TEST_CASE("end_delayed_step: delayed scales equal the reference's") {
    FRESH_RANDOM(rng);
    constexpr int64_t SCALES = 5;
    for (int length : {1, 3, 256, 257, 1024})
        for (const auto& [format, margin] : {std::pair{Format::E4M3, 0}, std::pair{Format::E5M2, 2}}) {
            CAPTURE(length);
            std::vector<reference::DelayedScale> wanted(SCALES);
            std::vector<AmaxAndScale> scales(SCALES);
            Floats histories;
            for (int64_t i = 0; i < SCALES; i++) {
                wanted[i].history.assign(length, 0.0f);
                for (float& amax : wanted[i].history)
                    amax = rng.below(3) ? static_cast<float>(std::exp(3 * rng.normal())) : 0.0f;
                if (i == 0) wanted[i].history.assign(length, 0.0f);  // before the first step
                histories.insert(histories.end(), wanted[i].history.begin(), wanted[i].history.end());
                scales[i].from_history = wanted[i].scale = i == 0 ? 0.0f : static_cast<float>(rng.uniform());
            }
            Buffer<float> device_histories(histories);
            Buffer<AmaxAndScale> device_scales(scales);
            Buffer<gpu::GradientState> state(1);
            Buffer<uint32_t> empty(1);
            for (const bool skipped : {false, true, false, false}) {
                scales = device_scales.read();
                for (int64_t i = 0; i < SCALES; i++) {
                    const float amax = i == 0   ? 0.0f   // has never had an amax
                                       : i == 1 ? 3e38f  // overflows when it is multiplied by 2^margin
                                                : static_cast<float>(std::exp(3 * rng.normal()));
                    scales[i].amax = wanted[i].amax = amax;
                }
                device_scales.write(scales);
                state.write({gpu::GradientState{1, 1, 1, skipped}});
                empty.zero();
                gpu::end_delayed_step(device_scales.get(), SCALES, device_histories.get(), length, margin,
                                      format, &state.get()->skip, empty.get(), 0);
                CHECK(empty.read()[0] == (skipped ? 0u : 1u));  // the first scale
                const auto got = device_scales.read();
                const Floats got_histories = device_histories.read();
                for (int64_t i = 0; i < SCALES; i++) {
                    if (!skipped) wanted[i].end_step(format, margin);
                    CHECK(got[i].from_history == wanted[i].scale);
                    const Floats& history = wanted[i].history;
                    CHECK(std::equal(history.begin(), history.end(), got_histories.begin() + i * length));
                }
            }
        }
}
