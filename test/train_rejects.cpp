// train_rejects.cpp - everything that ./train refuses: flags, sizes, data, checkpoints, files. Each gives one
// sentence that names what is at fault, exit code 1, and no file is lost, changed or left half-written.
#include "../program/flags.h"
#include "../program/plan.h"
#include "help/program.h"

using namespace coat;
using namespace coat::test;

namespace {

struct Row {
    std::string flags, says;
};
void check_rows(const Folder& folder, const std::string& before, const std::vector<Row>& rows) {
    for (const Row& row : rows) check_rejected(folder, before + row.flags, row.says);
}

}  // namespace

TEST_CASE("train: --help has at most 26 flags and 100 columns, and every row of the tables") {
    RunFolder folder;
    const Ended help = train(folder, "--help");
    require_success(help);
    int flags = 0;
    for (const std::string& line : lines_of(help.out)) {
        CHECK(line.size() <= 100);
        flags += line.compare(0, 4, "  --") == 0;
    }
    CHECK((flags > 20 && flags <= 26));
    for (const ModelConfig& c : models()) CHECK(contains(help.out, "\n  " + c.name));
    for (const Recipe& r : recipes()) CHECK(contains(help.out, "\n  " + std::string(r.name)));
    for (const OptimizerFormat& o : optimizers()) CHECK(contains(help.out, "\n  " + std::string(o.name)));
    CHECK(folder.files().size() == 1);  // only "text"
}

TEST_CASE("train: an unknown flag or value is rejected in one sentence") {
    RunFolder folder;
    check_rows(folder, "--device cpu --data text ",
               {{"--bacth 4", "--bacth"},
                {"text", "\"text\" is not a flag"},
                {"--batch=4", "--batch=4"},
                {"--batch", "--batch needs a value after it."},
                {"--batch 0", "--batch 0 is not a whole number from 1 to "},
                {"--batch 2.5", "--batch"},
                {"--batch ''", "--batch"},
                {"--batch 4294967297", "--batch"},
                {"--accumulate 0", "--accumulate"},
                {"--ranks 0", "--ranks"},
                {"--steps -5", "--steps"},
                {"--lr nan", "--lr nan is not a number from 0 to "},
                {"--lr -1", "--lr"},
                {"--lr 0.1x", "--lr"},
                {"--device tpu", "--device tpu is not one of: auto cpu gpu."},
                {"--master 'exact none'", "--master exact none is not one of: exact none."},
                {"--recipe fp9", "--recipe"},
                {"--optimizer sgd", "--optimizer"},
                {"--attention fp8", "--attention"},
                {"--master bf16", "--master"},
                {"--gradients some", "--gradients"},
                {"--model llama-tinny", "--model llama-tinny is not known; choose one of llama-tiny, "},
                {"--recipe \"$(printf 'a\\033[31mc')\"", "a?[31mc"},
                {"--resume ''", "--resume  has no complete checkpoint"}});
}

TEST_CASE("train: sizes, data, files and combinations that cannot work are rejected before the first step") {
    RunFolder folder;
    fs::create_directory(folder.path / "empty");
    fs::create_directory(folder.path / "llama-tiny");
    check_rows(folder, "--device cpu --data text --steps 1 --batch 1 ",
               {{"--model empty", "config.json"},
                {"--model \"$SMALL\" --seq 512", "--seq"},  // the model has 256 positions
                {"--model llama-tiny", "write ./llama-tiny for the folder"},
                {"--model ./llama-tiny", "./llama-tiny"},
                {"--model gpt2-tiny --gradients none", "--gradients none"},
                {"--model gpt2-tiny --gradients none --clip 0.5", "give --clip 0."},
                {"--model gpt2-tiny --gradients none --clip 0 --accumulate 2", "--accumulate 1"}});
    check_rows(folder, TINY + "--steps 2 --ranks 2 ",
               {{"--data nowhere", "Cannot read nowhere (No such file"},
                {"--bacth 2", "--bacth"},
                {"--seq 4096", "--seq 4096"},
                {"--resume nowhere", "nowhere"}});
    folder.write("short", "too few bytes for a batch");
    folder.write("large.bin", token_file(std::vector<uint16_t>(60000, 50300)));
    check_rows(folder, TINY + "--steps 2 ",
               {{"--data short", "--"},
                {"--data large.bin", "50300"},
                {"--out '' --log nowhere/log", "--log"},
                {"--out '' --log /", "--log"},
                {"--out text/out", "text cannot be created"}});
}

TEST_CASE("train: a saved setting has the limits of its flag") {
    nlohmann::ordered_json saved = Flags().settings(false);
    saved["optimizer"] = "coat";
    CHECK(Flags().take(saved) == "");
    saved["keep"] = 0;
    check_error([&] { Flags().take(saved); }, "--keep 0 is not a whole number from 1");
}

TEST_CASE("train: a checkpoint that is missing, finished, of another run or damaged is not continued") {
    RunFolder folder;
    fs::create_directory(folder.path / "hollow");
    require_success(tiny(folder, "--steps 2"));
    require_success(tiny(folder, "--steps 2 --accumulate 4 --out parts"));
    const std::string text = read_file(folder.path / "text"), one = "out/step-000002/";
    for (const auto& [name, at] : {std::pair{"first", size_t(0)}, {"last", text.size() - 1}}) {
        std::string changed = text;  // in one byte
        changed[at] ^= 1;
        folder.write(name, changed);
    }
    folder.write("longer", text + "x");
    check_rows(
        folder, "--device cpu --resume ",
        {{"nowhere", "nowhere"},
         {"hollow", "hollow"},
         {"parts --ranks 3 --steps 9", "4 micro-batches a step, which 3 ranks cannot share"},
         {"parts --ranks 2 --accumulate 4 --steps 9", "--accumulate 4 differs from the checkpoint's 2"},
         {"parts --accumulate 2 --steps 9", "--accumulate 2"},
         {"parts --out out --steps 9", "--out out already holds the checkpoint"}});
    check_rows(folder, "--device cpu --resume out --steps 4 ",
               {{"--model gpt2-tiny", "--model \"gpt2-tiny\" differs from the checkpoint's"},
                {"--recipe fp32", "--recipe"},
                {"--optimizer fp8", "--optimizer"},
                {"--attention groups", "--attention"},
                {"--master none", "--master"},
                {"--gradients none", "--gradients"},
                {"--batch 4", "--batch 4 differs from the checkpoint's 2"},
                {"--seq 32", "--seq"},
                {"--seed 2", "--seed"},
                {"--data first", "run, in train ("},
                {"--data last", "run, in held out ("},
                {"--data longer", "--data"}});
    check_rejected(folder, TINY + "--steps 2", "--out out already holds");  // it would replace another run's
    require_success(train(folder, "--device cpu --plan --resume out"));     // also of a finished run
    // A wrong --log is found before the damage in a file, which loading finds: that can take minutes.
    std::string flipped = read_file(folder.path / one / "optimizer.state");
    flipped.back() ^= 1;
    write_file(folder.path / one / "optimizer.state", flipped);
    check_rejected(folder, "--device cpu --resume out --steps 4 --log nowhere/log", "--log");
    check_rejected(folder, "--device cpu --resume out --steps 4", "optimizer.state");
    // A value that is given again and is equal, also if it is written otherwise, is no other run.
    flipped.back() ^= 1;
    write_file(folder.path / one / "optimizer.state", flipped);
    require_success(
        train(folder, "--device cpu --resume out --steps 4 --lr 30e-4 --optimizer coat --data ./text"));
}

TEST_CASE("train: ranks that are started by hand with other flags, data or weights end all") {
    RunFolder folder;
    const std::string text = read_file(folder.path / "text"), base = TINY + "--steps 2 --out '' --data data ";
    folder.write("a/data", text), folder.write("b/data", text + "x"), folder.write("c/data", text);
    for (const auto& [where, seed] : {std::pair<std::string, std::string>{"a", "1"}, {"c", "2"}})
        require_success(
            train(folder, TINY + "--data a/data --steps 1 --seed " + seed + " --out " + where + "/m"));
    // Rank 1 runs in another folder, as the first rank of another machine: the model m is another there.
    for (const auto& [flags, rank_1, where, says] :
         {std::tuple<std::string, std::string, std::string, std::string>{
              "", "--lr 1", "a", "Rank 1 differs from rank 0 in lr (1.0, there 0.003)"},
          {"", "--clip 2", "a", "in clip (2.0"},
          {"", "--save-every 3", "a", "in save-every (3"},
          {"", "--steps 3", "a", "in steps (3"},
          {"", "", "b", "Rank 1 differs from rank 0 in data_found"},
          {"--model m/step-000001 ", "", "a", ""},
          {"--model m/step-000001 ", "", "c", "Rank 1 differs from rank 0 in weights_found"}}) {
        INFO(flags, rank_1, where);
        const Ended ended = two_by_hand(folder, base + flags, base + flags + rank_1, "a", where);
        if (says.empty()) require_success(ended);
        else check_one_sentence(ended, says);
    }
}
