// generate.cpp - program/generate.cpp: samples of a run, and ./train --prompt.
#include "../program/generate.h"

#include "help/program.h"

using namespace coat;
using namespace coat::test;

using Words = std::vector<uint32_t>;
static constexpr uint32_t NOT_COUNTED = 1u << 31;

TEST_CASE("sample_prompt: the first 16 tokens of text; of conversations what comes before the first answer") {
    Words text(100, 7), chat(96, 7 | NOT_COUNTED);
    CHECK(sample_prompt(stream_of(text), 32) == Tokens(16, 7));
    CHECK(sample_prompt(stream_of(text), 17) == Tokens(16, 7));
    CHECK(sample_prompt(stream_of(text), 16).empty());  // no room for more
    // Windows of 32 tokens: one without an answer, and one each where the answer begins late and early.
    chat[32 + 20] = 5;
    chat[64 + 3] = 5;
    chat[64 + 5] = 5;
    CHECK(sample_prompt(stream_of(chat), 32) == Tokens(3, 7));
    chat.resize(64);
    CHECK(sample_prompt(stream_of(chat), 32) == Tokens(20, 7));
    chat.resize(52);
    CHECK(sample_prompt(stream_of(chat), 32).empty());
}

// How the small model continues a text where the most probable token is taken and T tokens are seen.
static std::string greedy(const std::string& checkpoint, std::string text, int64_t T, int count) {
    const std::unique_ptr<Model> model = make_reference_model(settings_of("bf16", small_config(), 1, T));
    load_weights(checkpoint, *model);
    std::vector<float> logits(256);
    for (int i = 0; i < count; i++) {
        const std::string seen = text.substr(text.size() - std::min(text.size(), size_t(T)));
        const Tokens tokens(reinterpret_cast<const uint8_t*>(seen.data()),
                            reinterpret_cast<const uint8_t*>(seen.data()) + seen.size());
        model->next_logits(tokens.data(), int64_t(tokens.size()), logits.data());
        text += char(std::max_element(logits.begin(), logits.end()) - logits.begin());
    }
    return text;
}

TEST_CASE("train: --prompt continues a text with the newest checkpoint on any number of ranks") {
    RunFolder folder;
    require_success(tiny(folder, "--steps 40 --lr 1e-2 --warmup 2 --seq 32 --save-every 20 --eval-every 0"));
    const auto before = folder.files();
    const std::string newest = folder / "out/step-000040", text = "int f12(int x) { return ";
    const auto answer = [&](const std::string& flags, const std::string& prompt) {
        folder.write("prompt", prompt);
        const Ended ended = train(folder, "--device cpu " + flags + " --prompt \"$(cat prompt)\"");
        require_success(ended);
        fs::remove(folder / "prompt");
        return ended;
    };
    // The most probable tokens; the model sees the last 32 tokens, as in its run, or --seq.
    const std::string most = "--new-tokens 20 --temperature 0 ";
    for (const std::string where : {"--model out", "--resume out", "--model out/step-000040"})
        CHECK(answer(most + where, text).out == printable(greedy(newest, text, 32, 20), "\n\t") + "\n");
    const Ended longer = answer(most + "--model out", text + text);
    CHECK(longer.out == printable(greedy(newest, text + text, 32, 20), "\n\t") + "\n");
    CHECK(longer.error == "train: The model sees the last 32 of the prompt's 48 tokens.\n");
    CHECK(answer(most + "--model out --seq 200", text + text).out ==
          printable(greedy(newest, text + text, 200, 20), "\n\t") + "\n");
    // An empty prompt begins as a new line does.
    CHECK("\n" + answer(most + "--model out", "").out ==
          printable(greedy(newest, "\n", 32, 20), "\n\t") + "\n");
    // The seed alone decides what is drawn.
    const std::string drawn = answer("--model out --new-tokens 100", text).out;
    CHECK(drawn.starts_with(text));
    CHECK(answer("--model out --new-tokens 100 --ranks 2", text).out == drawn);
    CHECK(answer("--model out --new-tokens 100 --seed 2", text).out != drawn);
    CHECK(answer("--model out --new-tokens 0", text).out == text + "\n");
    CHECK(folder.files() == before);
    check_rejected(folder, "--device cpu --prompt x --model llama-tiny", "--prompt needs a trained model");
    check_rejected(folder, "--device cpu --prompt x --resume nowhere", "--prompt needs a trained model");
    // A run that is still writing its first checkpoint.
    fs::create_directories(folder.path / "begun/step-000020.tmp");
    for (const std::string flag : {"--model", "--resume"})
        check_rejected(folder, "--device cpu --prompt x " + flag + " begun",
                       "begun has no config.json and no complete checkpoint; give the folder of a model");
}

TEST_CASE("train: the end of a run names a command that continues a text; checkpoints have their tokenizer") {
    RunFolder folder;
    const auto try_command = [&](const Ended& run) {
        const size_t at = run.out.find("\nTo use the model: ./train ");
        REQUIRE(at != std::string::npos);
        const std::string flags = run.out.substr(at + 27, run.out.find('\n', at + 1) - at - 27);
        return train(folder, flags + " --device cpu --new-tokens 5 --temperature 0");
    };
    const Ended bytes = tiny(folder, "--steps 1 --eval-every 0 --out bytes");
    CHECK(try_command(bytes).out.starts_with("Some text"));
    // Of token files: their tokenizer cuts text into words by rules that only Python knows. (Llama 3 cuts
    // 1234 into 123 and 4, and GPT-2 does not.) So --prompt could get other tokens than training had.
    folder.write("tokens/train.bin", token_file(std::vector<uint16_t>(2000, 7)));
    folder.write("tokens/tokenizer.bin", tokenizer_file(byte_vocabulary().pieces));
    folder.write("tokens/tokenizer.json", "{}");
    const std::string flags =
        "--device cpu --batch 2 --seq 16 --sample-every 0 --eval-every 0 --data tokens --model llama-tiny ";
    const Ended python = train(folder, flags + "--steps 1 --out python");
    require_success(python);
    CHECK(contains(python.out, "\nTo use the model: python3 data/chat.py python\n"));
    check_rejected(folder, "--device cpu --model python --prompt x",
                   "python/step-000001 has other tokens; use python3 data/chat.py python/step-000001.");
    // A checkpoint keeps tokenizer.bin alone, too, but then nothing is named at the end.
    fs::remove(folder / "tokens/tokenizer.json");
    const Ended alone = train(folder, flags + "--steps 1 --out alone");
    require_success(alone);
    CHECK(!contains(alone.out, "To use the model"));
    require_success(train(folder, "--device cpu --data tokens --steps 2 --resume alone"));
    CHECK(read_file(folder / "alone/step-000002/tokenizer.bin") ==
          read_file(folder / "tokens/tokenizer.bin"));
    check_rejected(
        folder, "--device cpu --model alone --prompt x",
        "use python3 data/chat.py alone/step-000002 --tokenizer and the folder of its token files.");
    CHECK(!contains(tiny(folder, "--steps 1 --out ''").out, "To use the model"));  // nothing was saved
}

TEST_CASE("train: a model of 256 tokens that has a tokenizer keeps it; its tokens are not bytes") {
    RunFolder folder;
    fs::copy(small_model(), folder.path / "chat");
    folder.write("chat/tokenizer.json", "{}");
    check_rejected(folder, "--device cpu --model chat --prompt x", "use python3 data/chat.py chat.");
    folder.write("tokens/train.bin", token_file(std::vector<uint16_t>(2000, 7)));
    folder.write("tokens/tokenizer.bin", tokenizer_file(byte_vocabulary().pieces));
    const Ended ended = train(folder, "--device cpu --batch 2 --seq 16 --data tokens --model chat --steps 1");
    require_success(ended);
    CHECK(contains(ended.out, "\nTo use the model: python3 data/chat.py out\n"));
    CHECK(!fs::exists(folder / "out/step-000001/tokenizer.bin"));
}

TEST_CASE("train: a sample of conversations continues a question and shows where the model begins") {
    RunFolder folder;
    Words tokens;  // packed windows of 32: "question?", a line end, "answer"
    const std::string question = "d\xC3\xA9j\xC3\xA0 vu? \xFF\n", answer = "yes yes yes yes yes yes";
    while (tokens.size() < 32 * 60) {
        for (const char c : question) tokens.push_back(uint8_t(c) | NOT_COUNTED);
        for (size_t i = 0; i < 32 - question.size(); i++) tokens.push_back(uint8_t(answer[i]));
    }
    folder.write("train.bin", token_file(tokens, 32));
    folder.write("tokenizer.bin", tokenizer_file(byte_vocabulary().pieces));
    const Ended ended = train(folder,
                              "--device cpu --model \"$SMALL\" --data train.bin --batch 2 --steps 1 "
                              "--sample-every 1 --eval-every 0 --out '' --log log");
    require_success(ended);
    // A byte that is no UTF-8 is shown by its number.
    CHECK(contains(ended.out,
                   "sample | step 1\n---------- held-out text\nd\xC3\xA9j\xC3\xA0 vu? \\xFF\n\n"
                   "---------- continued by the model\n"));
    const auto line = logged(folder, "sample").at(0);
    CHECK(line.at("prompt") == question.size());
    CHECK(line.at("tokens").size() == 32);
    CHECK(printable(ended.out, "\n\t") == ended.out);
}
