// test_adamw_ranks.cu - what several ranks need of adamw.cu: each updates slices of the parameters, and
// together they have the bits of one that updates all. One GPU plays all ranks, one after the other.
#include <numeric>

#include "../gpu/adamw.cuh"
#include "../program/plan.h"
#include "help/earlier_tensors.h"
#include "help/earlier_gpu.h"
#include "help/random.h"
#include "help/tiny.h"

using namespace coat;
using namespace coat::test;
using namespace coat::test::device_tensors;

namespace {

// Parameters whose sizes do not divide by the ranks: a vector, less than a unit, whole units, and more.
std::vector<Param> some_params() {
    std::vector<Param> params;
    int64_t offset = 0;
    for (auto [role, rows, cols] : {std::tuple{NORM_WEIGHT, 1, 80},
                                    {LINEAR, 16, 48},
                                    {LINEAR, 64, 384},
                                    {BIAS, 1, 4096},
                                    {LINEAR, 144, 400}}) {
        params.push_back({"", role, rows, cols, 0.02f, offset, 0});
        offset += params.back().padded_size();
    }
    return params;
}

Setup setup_of_rank(int64_t rank, int64_t ranks) {
    Setup s = tiny_setup(tiny_config(LLAMA, true), "coat", "coat");
    s.rank = rank, s.ranks = ranks;
    return s;
}

// The memory of one rank: masters, moments and gradients of what it keeps, weights of what it keeps.
struct RankState {
    std::vector<Param> params = some_params();
    std::vector<ShardPlace> at;
    int64_t weights = 0, states = 0, units = 0;
    std::unique_ptr<Buffer<uint16_t>> weight, gradient;
    std::unique_ptr<Buffer<int16_t>> remainder;
    std::unique_ptr<Buffer<float>> plain, scales;  // FP32 moments, and (max, k) of FP8 moments
    std::unique_ptr<Buffer<uint8_t>> codes;
    std::unique_ptr<Buffer<gpu::Segment>> segments;
    Buffer<AmaxAndScale> amax;

    RankState(const Setup& s, bool master) : amax(int64_t(params.size())) {
        for (const Param& p : params) {
            at.push_back({kept_weight(s, p), owned(s, p), weights, states, units});
            weights += round_up(at.back().weight.count, MOMENT_GROUP);
            states += round_up(at.back().state.count, MOMENT_GROUP);
            units += ceil_div(p.size(), SHARD_UNIT);
        }
        weight = std::make_unique<Buffer<uint16_t>>(weights);
        gradient = std::make_unique<Buffer<uint16_t>>(states);
        remainder = std::make_unique<Buffer<int16_t>>(states);
        plain = std::make_unique<Buffer<float>>(2 * states);
        codes = std::make_unique<Buffer<uint8_t>>(2 * states);
        const int64_t groups = states / MOMENT_GROUP;
        scales = std::make_unique<Buffer<float>>(4 * groups);
        scales->write(std::vector<float>(size_t(4 * groups), 1.0f));
        plain->zero(), codes->zero(), gradient->zero(), amax.zero();
        const gpu::Weights w{weight->get(), master ? remainder->get() : nullptr, Format::BF16};
        std::vector<gpu::Segment> table;
        for (size_t i = 0; i < params.size(); i++) {
            const Param& p = params[i];
            gpu::initialize(w, p, at[i], i, p.size(), 3, 0);
            const int64_t first = at[i].state_at, group = first / MOMENT_GROUP;
            auto moment = [&](int second) -> gpu::MomentView {
                if (!p.role.fp8_state)
                    return {plain->get() + second * states + first, nullptr, nullptr, Format::F32};
                float* const max = scales->get() + 2 * second * groups + group;
                return {codes->get() + second * states + first, max, max + groups, Format::E4M3};
            };
            table.push_back({first, at[i].state.count, moment(0), moment(1), p.role.decay, amax.get() + i,
                             at[i].weight_at + at[i].state.first - at[i].weight.first - first,
                             p.offset + at[i].state.first - first,
                             at[i].shard_unit + at[i].state.first / SHARD_UNIT});
        }
        segments = std::make_unique<Buffer<gpu::Segment>>(table);
    }

    // Gradients by their place in the flat order.
    void write_gradients(const std::vector<uint16_t>& flat) {
        std::vector<uint16_t> mine(size_t(states), 0);
        for (size_t i = 0; i < params.size(); i++)
            std::copy_n(flat.begin() + params[i].offset + at[i].state.first, at[i].state.count,
                        mine.begin() + at[i].state_at);
        gradient->write(mine);
    }
    void update(int64_t step, const gpu::GradientState* state, bool master) {
        const gpu::Weights w{weight->get(), master ? remainder->get() : nullptr, Format::BF16};
        gpu::adamw({step, 1e-2f}, find_row(optimizers(), "coat", ""), segments->get(), int(params.size()),
                   {0, states}, w, rounding_key(5, step), gradient->get(), Format::BF16, state, 0);
    }
    // What is kept, in the flat order; elements that are not kept stay as they are.
    template <class T>
    void put(const Buffer<T>& from, bool of_weights, std::vector<T>& flat, int64_t shift = 0) const {
        const std::vector<T> all = from.read();
        for (size_t i = 0; i < params.size(); i++) {
            const Slice slice = at[i].state;
            const int64_t place =
                of_weights ? at[i].weight_at + slice.first - at[i].weight.first : at[i].state_at + shift;
            std::copy_n(all.begin() + place, slice.count, flat.begin() + params[i].offset + slice.first);
        }
    }
};

std::vector<uint16_t> random_gradients(Random& rng, int64_t n) {
    std::vector<uint16_t> bits;
    for (float x : normals(rng, Format::BF16, n)) bits.push_back(reference::to_bf16(x));
    return bits;
}

}  // namespace

GPU_TEST_CASE("adamw, gradient_squares, gradient_norm: ranks with slices have the bits of one with all") {
    FRESH_RANDOM(rng);
    const std::vector<Param> params = some_params();
    const int64_t total = params.back().offset + params.back().padded_size();
    struct Flat {
        std::vector<uint16_t> weight;
        std::vector<int16_t> remainder;
        std::vector<uint8_t> m, v;
        std::vector<float> plain;
        std::vector<AmaxAndScale> amax;
        double norm = 0;
    };
    for (bool master : {true, false}) {
        const std::vector<uint16_t> gradients[] = {random_gradients(rng, total),
                                                   random_gradients(rng, total)};
        auto run = [&](int64_t ranks) {
            std::vector<std::unique_ptr<RankState>> states;
            for (int64_t r = 0; r < ranks; r++)
                states.push_back(std::make_unique<RankState>(setup_of_rank(r, ranks), master));
            const int64_t units = states[0]->units;
            Buffer<gpu::GradientState> state(1);
            Buffer<double> sums(ranks * (1 + units));
            for (int64_t step = 1; step <= 2; step++) {
                state.zero();
                for (int64_t r = 0; r < ranks; r++) {
                    states[size_t(r)]->write_gradients(gradients[step - 1]);
                    gpu::gradient_squares(states[size_t(r)]->segments->get(), int(params.size()),
                                          states[size_t(r)]->gradient->get(), Format::BF16, 0, 0, units,
                                          nullptr, sums.get() + r * (1 + units), 0);
                }
                gpu::gradient_norm(sums.get(), units, ranks, 1.0f, state.get(), 0);
                for (const auto& s : states) s->update(step, state.get(), master);
            }
            Flat flat{std::vector<uint16_t>(size_t(total)),
                      std::vector<int16_t>(size_t(total)),
                      Bytes(size_t(total)),
                      Bytes(size_t(total)),
                      Floats(size_t(total)),
                      std::vector<AmaxAndScale>(params.size()),
                      state.read()[0].norm};
            std::vector<AmaxAndScale> all;
            for (const auto& s : states) {
                s->put(*s->weight, true, flat.weight);
                if (master) s->put(*s->remainder, false, flat.remainder);
                s->put(*s->codes, false, flat.m), s->put(*s->codes, false, flat.v, s->states);
                s->put(*s->plain, false, flat.plain);
                for (const AmaxAndScale& t : s->amax.read()) all.push_back(t);
                CHECK((s->weight->intact() && s->remainder->intact() && s->codes->intact() &&
                       s->scales->intact()));
            }
            const Buffer<AmaxAndScale> theirs(all), combined(int64_t(params.size()));
            gpu::combine_amaxes(combined.get(), theirs.get(), int64_t(params.size()), ranks, Format::E4M3, 0);
            flat.amax = combined.read();
            CHECK(sums.intact());
            return flat;
        };
        const Flat one = run(1);
        CHECK(one.norm > 0);
        for (int64_t ranks : {2, 3, 4, 7}) {
            CAPTURE(ranks);
            const Flat several = run(ranks);
            CHECK(several.norm == one.norm);
            CHECK(several.weight == one.weight);
            CHECK(several.remainder == one.remainder);
            CHECK(several.m == one.m);
            CHECK(several.v == one.v);
            CHECK(several.plain == one.plain);
            for (size_t i = 0; i < params.size(); i++) {
                CHECK(several.amax[i].amax == one.amax[i].amax);
                CHECK(several.amax[i].scale == reference::scale_of(Q_E4M3, one.amax[i].amax));
            }
        }
    }
}
