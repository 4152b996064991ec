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
                            "--eval-every 0 --schedule constant ";
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

TEST_CASE("train: windows and steps in which no token counts are reported, and nothing is NaN") {
    Folder folder;
    std::vector<uint16_t> tokens;
    for (int i = 0; i < 1601; i++) tokens.push_back(static_cast<uint16_t>(i * i % 251));
    std::string mask(tokens.size(), '\0');
    for (size_t i = 0; i < 400; i++) mask[i] = '\1';
    for (const char* name : {"train", "val"}) {
        folder.write(std::string(name) + ".bin", token_file(tokens));
        folder.write(std::string(name) + ".mask", mask);
    }
    const std::string run = "--device cpu --data train.bin,val.bin --batch 1 --seq 16 ";
    const Ended ended = train(
        folder, run + "--steps 40 --warmup 0 --eval-every 0 --sample-every 0 --out '' --log log");
    require_success(ended);
    CHECK(contains(ended.out, "75 of the 100 windows"));
    int64_t skipped = 0;
    for (const auto& line : logged(folder, "step")) {
        REQUIRE(line.at("loss").is_number());
        CHECK((line.at("loss") == 0) == line.at("skipped"));
        skipped += line.at("skipped").get<bool>();
    }
    CHECK((skipped > 20 && skipped < 40));  // more than MOST_SKIPPED: the run has not diverged
    CHECK(contains(ended.out, "skipped: no token counts"));
    folder.write("val.mask", std::string(mask.size(), '\0'));
    check_one_sentence(train(folder, run + "--steps 1"), "--data");
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

TEST_CASE("train: --steps 0 prints perplexity, bits per byte, and a sample in the model's own tokens" *
          doctest::skip(NO_PYTHON)) {
    const ChatFolder folder;
    require_success(folder.tokenize(same_answers()));
    const std::string run = "--device cpu --data tokens --batch 4 --seq 32 ";
    require_success(train(folder, run + "--sample-every 0 --steps 20 --warmup 2 --schedule constant"));
    const std::string model = "out/step-000020";
    fs::copy_file(folder.path / "model/tokenizer.json", folder.path / model / "tokenizer.json");
    const std::string evaluate = "'" + program() + "' " + run + "--steps 0 --log log --model " + model;
    const Ended silent = shell(folder, evaluate);
    require_success(silent);
    CHECK(!contains(silent.out, "sample |"));
    const nlohmann::json line = logged(folder, "validation").at(0);
    const double loss = line.at("loss");
    CHECK(line.at("perplexity").get<double>() == doctest::Approx(std::exp(loss)));
    // Three letters and the end of the text count in each conversation; the end stands for no byte.
    const double bits = loss / std::log(2.0) * 4 / 3;
    CHECK(line.at("bits_per_byte").get<double>() == doctest::Approx(bits).epsilon(1e-9));
    const Ended sampled = shell(folder, "PYTHONPATH=. " + evaluate + " --temperature 0 --prompt \"it's 7\"");
    require_success(sampled);
    CHECK(contains(sampled.out, "----------\nit's 7yes<|end|>"));
    const std::vector<int32_t> tokens = logged(folder, "sample").at(0).at("tokens");
    REQUIRE(tokens.size() == 32);
    CHECK(std::vector<int32_t>(tokens.begin(), tokens.begin() + 10) ==
          std::vector<int32_t>{'i', 't', '\'', 's', ' ', '7', 'y', 'e', 's', 258});
    check_one_sentence(shell(folder, "PYTHONPATH=. " + evaluate + " --prompt " + std::string(40, 'x')),
                       "--prompt");
    folder.write(model + "/tokenizer.json", R"(["<|user|>", "<|assistant|>", "<|end|>", "<|more|>"])");
    check_one_sentence(shell(folder, "PYTHONPATH=. " + evaluate + " --prompt '<|more|>'"), "vocabulary");
    // The prompt is not read as a flag of the script.
    const Ended dash = shell(folder, "PYTHONPATH=. " + evaluate + " --prompt '--d'");
    CHECK(!contains(dash.out, "expected one argument"));
    folder.write("tokenizers.py", "raise ImportError()");
    const Ended numbers = shell(folder, "PYTHONPATH=. " + evaluate + " --prompt c");
    require_success(numbers);
    CHECK(contains(numbers.out, "--prompt cannot be tokenized"));
    CHECK(contains(numbers.out, "pip install tokenizers"));
    CHECK(contains(numbers.out, "----------\n<0><"));
    const Ended without = shell(folder, "PATH=/nowhere " + evaluate + " --prompt c");
    require_success(without);
    CHECK(contains(without.out, "python3 is missing"));
}
