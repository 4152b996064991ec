// test_tokens_loader.cpp - the Loader of data/tokens.cpp: the order of windows and batches.
#include <doctest/doctest.h>

#include <map>
#include <numeric>

#include "token_files.h"

using namespace coat;
using namespace coat::test;
using namespace coat::test::token_files;

namespace {

TokenStream counting(int64_t n) {
    std::vector<uint32_t> tokens(static_cast<size_t>(n));
    std::iota(tokens.begin(), tokens.end(), 0u);
    return stream_of(tokens);
}

// The windows, in order, of a loader of counting() with B = T = 1.
std::vector<int32_t> windows_of_epoch(Loader& loader) {
    std::vector<int32_t> order;
    for (int64_t i = 0; i < loader.windows(); i++) {
        int32_t token, target;
        loader.next(&token, &target);
        CHECK(target == token + 1);
        order.push_back(token);
    }
    return order;
}

bool is_permutation_of_all(std::vector<int32_t> order) {
    std::sort(order.begin(), order.end());
    for (size_t i = 0; i < order.size(); i++)
        if (order[i] != static_cast<int32_t>(i)) return false;
    return true;
}

}  // namespace

TEST_CASE("Loader: each epoch gives every window once, in another order for each epoch and seed") {
    FRESH_RANDOM(rng);
    std::vector<int64_t> sizes(70);
    std::iota(sizes.begin(), sizes.end(), 1);
    for (int64_t n : {255, 256, 257, 1023, 1024, 1025, 4097, 70001}) sizes.push_back(n);
    for (int64_t n : sizes) {
        const uint64_t seed = rng.bits();
        Loader loader(counting(n + 1), 1, 1, seed), other(counting(n + 1), 1, 1, seed + 1);
        REQUIRE(loader.windows() == n);
        const std::vector<int32_t> first = windows_of_epoch(loader), second = windows_of_epoch(loader),
                                   third = windows_of_epoch(other);
        CHECK(
            (is_permutation_of_all(first) && is_permutation_of_all(second) && is_permutation_of_all(third)));
        CHECK((loader.position().epoch == 2 && loader.position().window == 0));
        if (n < 20) continue;  // two equal orders are unlikely: there are 20!
        CHECK((first != second && first != third && !std::is_sorted(first.begin(), first.end())));
    }
}

TEST_CASE("Loader: every window is equally likely at every position") {
    FRESH_RANDOM(rng);
    // Each window is at each position 1000 times on average, with a standard deviation of 29.3.
    constexpr int64_t N = 7, EPOCHS = 7000;
    Loader loader(counting(N + 1), 1, 1, rng.bits());
    int64_t seen[N][N] = {};
    for (int64_t epoch = 0; epoch < EPOCHS; epoch++) {
        const std::vector<int32_t> order = windows_of_epoch(loader);
        for (size_t position = 0; position < N; position++) seen[position][order[position]]++;
    }
    for (const auto& position : seen)
        for (int64_t times : position)
            CHECK(std::abs(times - EPOCHS / N) < 6 * 29.3);  // 6 sigma are exceeded in one of 10^7 runs
}

TEST_CASE("Loader: batches span epochs, windows overlap by one token, and a position resumes exactly") {
    FRESH_RANDOM(rng);
    constexpr int64_t B = 3, T = 4, WINDOWS = 7;
    const TokenStream stream = counting(WINDOWS * T + 3);  // two tokens short of another window
    const uint64_t seed = rng.bits();
    Loader loader(stream, B, T, seed);
    REQUIRE(loader.windows() == WINDOWS);
    std::vector<Loader::Position> positions;
    std::vector<std::vector<int32_t>> batches;
    std::map<int32_t, int> times;
    for (int64_t batch = 0; batch < 2 * WINDOWS; batch++) {  // six epochs
        std::vector<int32_t> tokens(B * T), targets(B * T);
        positions.push_back(loader.position());
        loader.next(tokens.data(), targets.data());
        for (size_t b = 0; b < B; b++) {
            CHECK(tokens[b * T] % T == 0);
            times[tokens[b * T]]++;
            for (size_t t = 0; t < T; t++) {
                CHECK(tokens[b * T + t] == tokens[b * T] + static_cast<int32_t>(t));
                CHECK(targets[b * T + t] == tokens[b * T + t] + 1);
            }
        }
        batches.push_back(tokens);
    }
    CHECK(times.size() == WINDOWS);
    for (const auto& [window, n] : times) CHECK(n == 6);
    for (size_t from = 0; from < positions.size(); from++) {
        Loader resumed(stream, B, T, seed);
        resumed.seek(positions[from]);
        for (size_t batch = from; batch < batches.size(); batch++) {
            std::vector<int32_t> tokens(B * T), targets(B * T);
            resumed.next(tokens.data(), targets.data());
            CHECK(tokens == batches[batch]);
        }
    }
}

TEST_CASE("Loader: fewer tokens than one batch, and a position beyond the data, are rejected") {
    CHECK_NOTHROW(Loader(counting(4 * 8 + 1), 4, 8, 1));
    for (int64_t n : {0, 1, 2, 8, 9, 32})
        check_error([&] { Loader(counting(n), 4, 8, 1); }, "--batch");
    check_error([] { Loader(TokenStream(), 1, 1, 1); }, "--batch");
    Loader loader(counting(101), 1, 10, 1);
    loader.seek({5, 9});
    for (const Loader::Position& p :
         {Loader::Position{0, 10}, Loader::Position{0, -1}, Loader::Position{-1, 0}})
        check_error([&] { loader.seek(p); }, "--data");
}
