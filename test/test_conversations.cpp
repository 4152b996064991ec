// test_conversations.cpp - instruction data from end to end: data/tokenize.py packs conversations and writes
// masks, and ./train trains on what counts.
#include <doctest/doctest.h>

#include <cmath>

#include "conversations.h"
#include "ports.h"

using namespace coat;
using namespace coat::test;
using namespace coat::test::conversations;

TEST_CASE("train: learns what counts in conversations, and resumes with the same bits and the same mask" *
          doctest::skip(NO_PYTHON)) {
    const ChatFolder folder;
    require_success(folder.tokenize(same_answers()));
    const std::string run = "--device cpu --data tokens --batch 4 --seq 32 --sample-every 0 --warmup 2 "
                            "--eval-every 0 --lr 3 --warmup 2000 --clip 1 ";
    const Ended whole = train(folder, run + "--steps 20 --out whole");
    require_success(whole);
    const double first = number_after(whole.out, "validation | step 0 | loss "),
                 last = number_after(whole.out, "validation | step 20 | loss ");
    CHECK(first > 5);
    CHECK(last < 0.2);  // a loss over all tokens could not fall so far
    require_success(train(folder, run + "--steps 10 --out part"));
    require_success(train(folder, "--device cpu --resume part --steps 20"));
    auto weights = [&](const char* out) {
        return read_file(folder.path / out / "step-000020/model.safetensors") +
               read_file(folder.path / out / "step-000020/optimizer.safetensors");
    };
    CHECK(weights("whole") == weights("part"));

    const std::string mask = read_file(folder.path / "tokens/train.mask");
    write_file(folder.path / "tokens/train.mask", std::string(mask.size(), '\1'));
    check_rejected(folder, "--device cpu --resume whole --steps 21", "--data");
    fs::remove(folder.path / "tokens/train.mask");
    check_rejected(folder, "--device cpu --resume whole --steps 21", "--data");
    write_file(folder.path / "tokens/train.mask", std::string(mask.size(), '\0'));
    check_one_sentence(train(folder, run + "--steps 1 --out none"), "--data");
    write_file(folder.path / "tokens/train.mask", mask.substr(1));
    check_rejected(folder, "--device cpu --resume whole --steps 21", "train.mask");
}

TEST_CASE("train: with a mask, two ranks have the losses of one with twice the micro-batches" *
          doctest::skip(NO_PYTHON)) {
    const ChatFolder folder;
    require_success(folder.tokenize(same_answers()));
    const std::string run =
        "--device cpu --data tokens --batch 2 --seq 32 --sample-every 0 --recipe fp32 --steps 3 ";
    require_success(train(folder, run + "--accumulate 4 --out '' --log log"));
    const auto one = logged(folder, "step"), validated = logged(folder, "validation");
    const std::string port = "MASTER_PORT=" + std::to_string(free_port()) + " ";
    require_success(shell(folder, port + "'" + program() + "' " + run +
                                      "--accumulate 2 --ranks 2 --out '' --log log"));
    const auto two = logged(folder, "step");
    REQUIRE((one.size() == 3 && two.size() == 3));
    // FP32 sums in another order, since the embedding is tied. Means of means would differ by more than 1e-3.
    auto check_loss = [](const nlohmann::json& a, const nlohmann::json& b) {
        CHECK(a.at("loss").get<double>() == doctest::Approx(b.at("loss").get<double>()).epsilon(1e-6));
    };
    for (size_t i = 0; i < 3; i++) check_loss(one[i], two[i]);
    const auto again = logged(folder, "validation");
    for (size_t i = 0; i < validated.size(); i++) check_loss(validated[i], again[i]);
}

// All windows have the same tokens, and in one of the runs a single one has targets. So both make the same
// update of the first weights, one run in its first step, and the other after skipped ones.
TEST_CASE("train: after skipped steps, stochastic rounding has new random bits") {
    constexpr int64_t WINDOWS = 8, T = 16;
    Folder folder;
    std::vector<uint16_t> tokens;
    for (int64_t i = 0; i < WINDOWS * T + 1; i++) tokens.push_back(static_cast<uint16_t>(i % T));
    for (const char* name : {"train.bin", "val.bin"}) folder.write(name, token_file(tokens));
    const std::string run = "--device cpu --data train.bin,val.bin --batch 1 --seq 16 --recipe bf16 "
                            "--gradients none --clip 0 --master none --schedule constant "
                            "--warmup 0 --eval-every 0 --sample-every 0 ";
    require_success(train(folder, run + "--steps 1 --out early"));
    std::string mask(tokens.size(), '\0');
    std::fill(mask.begin() + 1, mask.begin() + 1 + T, '\1');  // targets of the first window
    folder.write("train.mask", mask);
    require_success(train(folder, run + "--steps 8 --out late --log log"));
    CHECK(logged(folder, "step").at(0).at("skipped"));
    const fs::path early = folder.path / "early/step-000001", late = folder.path / "late/step-000008";
    CHECK((read_file(early / "optimizer.safetensors") == read_file(late / "optimizer.safetensors")));
    CHECK((read_file(early / "model.safetensors") != read_file(late / "model.safetensors")));
}
