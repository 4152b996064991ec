// train_rejects.cpp - everything that ./train refuses: flags, sizes, data, checkpoints, files. Each gives one
// sentence that names what is at fault, exit code 1, and no file is lost, changed or left half-written.
#include "help/program.h"

using namespace coat;
using namespace coat::test;

// Each row has flags and, after a bar, what the error says. Without a bar the error has the first word.
static void check_rows(const Folder& folder, const std::string& before, const std::string& rows) {
    for (const std::string& row : lines_of(rows)) {
        if (row.empty()) continue;  // the line before the first row
        const std::string flags = row.substr(0, row.find(" | "));
        const std::string first_word = flags.substr(0, flags.find(' '));
        check_rejected(folder, before + flags, flags == row ? first_word : row.substr(flags.size() + 3));
    }
}

TEST_CASE("train: an unknown flag or value is rejected in one sentence") {
    check_rows(RunFolder(), "--device cpu --data text ", R"(
text
--batch | --batch needs a value after it
--batch 2.5
--batch ''
--batch= | --batch  is not
--plan=yes | --plan takes no value
--batch 0 | --batch 0 is not a whole number from 1 to
--batch 4294967297
--accumulate 0
--ranks 0
--steps -5
--lr nan
--lr -1
--lr 1e99
--lr 0.1x | --lr 0.1x is not a number of at least 0 that is finite in FP32; give such a number.
--device tpu
--recipe fp9
--optimizer sgd
--attention fp8
--master bf16
--master 'exact none'
--gradients some
--model llama-tinny | no model that ./train --help lists
--model Qwen/Qwen2.5-0.5B | no folder on this machine
--model llama-30b --batch 1024 --seq 2048 | GB; choose a smaller --model, --batch or --seq.
--recipe "a$(printf '\033')[31mc" | a?[31mc
--resume '' | --resume  has no complete checkpoint)");
}

TEST_CASE("train: an unknown flag is rejected and the error says where all flags are listed") {
    const RunFolder folder;
    for (const std::string word : {"--save_every", "--bacth", "-steps", "x"})
        check_rejected(folder, word + " 4",
                       "train: " + word + " is not a flag; ./train --help lists all flags.");
}

TEST_CASE("train: sizes and data and files that cannot work are rejected before the first step") {
    RunFolder folder;
    fs::create_directory(folder.path / "empty");
    fs::create_directory(folder.path / "llama-tiny");
    fs::copy(small_model(), folder.path / "chat");
    folder.write("chat/tokenizer.json", "{}");
    shell(folder, "sed -i 's/vocab_size.: 256/vocab_size\": 300/' chat/config.json");
    folder.write("short", "too few bytes for a batch");
    folder.write("large.bin", token_file(std::vector<uint16_t>(60000, 50300)));
    // The small model has 256 positions, and vocabulary 256.
    check_rows(folder, TINY + "--steps 2 ", R"(
--seq 512 | --seq
--data short | --
--data large.bin | 50300
--ranks 2 --data nowhere | No such file
--ranks 1000 | --ranks 1000 is too many for a machine of
--ranks 2 --bacth 2 | --bacth
--ranks 2 --seq 4096 | --seq 4096
--ranks 2 --resume nowhere | nowhere
--out '' --log nowhere/log | --log
--out '' --log / | --log
--out text/out | text is not a folder
--model empty | empty has no config.json and no complete checkpoint
--model ./llama-tiny | ./llama-tiny
--model llama-tiny | write ./llama-tiny for the folder
--model chat | --data contains bytes
--model gpt2-tiny --gradients none | --gradients none
--model gpt2-tiny --gradients none --clip 0.5 | give --clip 0.
--model gpt2-tiny --gradients none --clip 0 --accumulate 2 | --accumulate 1
--ranks 2 --gradients none --clip 0 | several ranks
--ranks 2 --gradients none | several ranks
--out new --data nowhere | nowhere
--out a/b/c --seq 512 | --seq
--ranks 2 --out new --data short | --)");
    // A folder that cannot be created comes before the data, and so does a wrong flag.
    check_rows(folder, TINY + "--steps 2 --data nowhere ", R"(
--recipe fp9
--optimizer sgd
--model llama-tinny
--gradients none | give --clip 0.
--out text/out | text is not a folder)");
    // What fails in the first validation, after the model was made, leaves no folder either.
    folder.write("val.bin", token_file(std::vector<uint32_t>(2000, 5 | 1u << 31)));
    folder.write("train.bin", token_file(std::vector<uint32_t>(2000, 5)));
    check_rejected(folder, TINY + "--data train.bin,val.bin --out new/folder", "No token of the held-out");
}

TEST_CASE("train: a checkpoint that is missing or of another run or damaged is not continued") {
    RunFolder folder;
    fs::create_directory(folder.path / "hollow");
    require_success(tiny(folder, "--steps 2"));
    require_success(tiny(folder, "--steps 2 --accumulate 4 --out parts"));
    const std::string text = read_file(folder.path / "text"), state = "out/step-000002/optimizer.state";
    for (const auto& [name, at] : {std::pair{"first", size_t(0)}, {"last", text.size() - 1}}) {
        std::string changed = text;  // in one byte
        changed[at] ^= 1;
        folder.write(name, changed);
    }
    folder.write("longer", text + "x");
    check_rows(folder, "--device cpu --steps 9 --resume ", R"(
nowhere
hollow
parts --ranks 3 | 4 micro-batches a step, which 3 ranks cannot share
parts --ranks 2 --accumulate 4 | --accumulate 4 differs from the checkpoint's 2
parts --accumulate 2 | --accumulate 2
parts --out out | --out out already holds the checkpoint)");
    const std::string resume = "--device cpu --resume out --steps 4 ";
    check_rows(folder, resume, R"(
--model gpt2-tiny | --model "gpt2-tiny" differs from the checkpoint's
--recipe fp32
--optimizer fp8
--attention groups
--master none
--gradients none
--batch 4
--seq 32
--seed 2
--data first | is not the data of the checkpoint's run
--data last | is not the data of the checkpoint's run
--data longer | is not the data of the checkpoint's run)");
    check_rejected(folder, TINY + "--steps 2", "--out out already holds");  // it would replace another run's
    require_success(train(folder, "--device cpu --plan --resume out"));     // also of a finished run
    // A value that is given again and is equal, also if it is written otherwise, is no other run.
    require_success(train(folder, resume + "--lr 30e-4 --optimizer coat --data ./text --out equal"));
    std::string flipped = read_file(folder / state);
    flipped.back() ^= 1;
    write_file(folder / state, flipped);
    check_rejected(folder, resume, state);
}

TEST_CASE("train: ranks that are started by hand with other flags or data or weights end all") {
    RunFolder folder;
    const std::string text = read_file(folder.path / "text"), base = TINY + "--steps 2 --out '' --data data ";
    folder.write("a/data", text);
    folder.write("b/data", text + "x");
    folder.write("c/data", text);
    for (const auto& [where, seed] : {std::pair<std::string, std::string>{"a", "1"}, {"c", "2"}})
        require_success(tiny(folder, "--data a/data --steps 1 --seed " + seed + " --out " + where + "/m"));
    // Rank 1 runs in another folder, as the first rank of another machine: the model m is another there.
    const std::string rows[][4] = {{"", "--lr 1", "a", "Rank 1 differs from rank 0 in lr (1.0, there 0.003)"},
                                   {"", "--clip 2", "a", "in clip (2.0"},
                                   {"", "--save-every 3", "a", "in save-every (3"},
                                   {"", "--steps 3", "a", "in steps (3"},
                                   {"", "", "b", "Rank 1 has other --data than rank 0: data has "},
                                   {"--model m/step-000001 ", "", "a", ""},
                                   {"--model m/step-000001 ", "", "c", "in weights_found"}};
    for (const auto& [flags, rank_1, where, says] : rows) {
        INFO(flags, rank_1, where);
        const Ended ended = two_by_hand(folder, base + flags, base + flags + rank_1, "a", where);
        if (says.empty()) require_success(ended);
        else check_one_sentence(ended, says);
    }
}
