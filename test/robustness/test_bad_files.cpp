// test_bad_files.cpp - JSON files, checkpoints and corpora that are hostile or very large. Each is read, or
// rejected in one sentence, without a crash and without using much time or memory.
#include <doctest/doctest.h>

#include <climits>
#include <cstring>
#include <fstream>

#include "../bad_files.h"
#include "../help/program.h"

using namespace coat;
using namespace coat::test;
using namespace coat::test::bad_files;

namespace {

std::string deep(int depth) {
    return std::string(static_cast<size_t>(depth), '[') + std::string(static_cast<size_t>(depth), ']');
}

}  // namespace

TEST_CASE("json: a file nested a million levels deep is rejected by name") {
    Folder folder;
    const std::string nested = deep(1'000'000);
    const std::string checkpoint = saved_checkpoint(folder / "out");
    auto change = [&](const std::string& path, const std::string& from, const std::string& to) {
        std::string text = read_file(path);
        replace(text, from, to);
        write_file(path, text);
    };
    change(checkpoint + "/config.json", "\"hidden_act\": \"silu\"", "\"hidden_act\": " + nested);
    check_error([&] { read_model_config(checkpoint); }, "config.json", "nested");
    change(checkpoint + "/trainer.json", "\"version\": 2", "\"version\": " + nested);
    check_error([&] { read_loop_state(checkpoint); }, "trainer.json", "nested");
    folder.write("shards/model.safetensors.index.json", "{\"weight_map\": {\"a\": " + nested + "}}");
    check_error([&] { load_weights(folder / "shards", *make_reference(small_setup())); }, "index.json",
                "nested");
    check_error([&] { Vocabulary::read(folder.write("v.json", "{\"format\": " + nested + "}")); }, "v.json");
    const std::string file = folder.write("a.safetensors", only_header("{\"a\":" + nested + "}"));
    check_error([&] { Safetensors s(file); }, file, "nested");
}

TEST_CASE("json: brackets in strings are allowed, and duplicate names are rejected") {
    Folder folder;
    const std::string brackets(1000, '{');
    const Vocabulary v = Vocabulary::read(folder.write("v.json", vocabulary({brackets, "\"[\\", ":,"})));
    CHECK(v.decode({0, 1, 2}) == brackets + "\"[\\:,");
    const std::string size_twice = "{\"size\": 1, " + vocabulary({"a"}).substr(1);
    check_error([&] { Vocabulary::read(folder.write("v.json", size_twice)); }, "v.json");
    const std::string config = saved_checkpoint(folder / "out") + "/config.json";
    std::string text = read_file(config);
    replace(text, "{", "{\"hidden_size\": 1024, ");
    write_file(config, text);
    check_error([&] { read_model_config(fs::path(config).parent_path().string()); }, config, "twice");
}

TEST_CASE("load_checkpoint: counts in trainer.json that would overflow are rejected") {
    Folder folder;
    const std::string checkpoint = saved_checkpoint(folder / "out"), path = checkpoint + "/trainer.json",
                      good = read_file(path);
    for (const char* field : {"step", "updates", "epoch", "tokens"}) {
        nlohmann::ordered_json state = nlohmann::ordered_json::parse(good);
        state[field] = INT64_MAX;
        if (field == std::string("updates")) state["step"] = INT64_MAX;
        write_file(path, state.dump());
        check_error([&] { read_loop_state(checkpoint); }, path);
    }
}

TEST_CASE("Safetensors: 80,000 tensors are written and read in seconds; more than 100,000 are rejected") {
    Folder folder;
    auto write = [&](const std::string& name, int64_t tensors) {
        std::vector<TensorInfo> table;
        for (int64_t i = 0; i < tensors; i++) table.push_back({{"tensor." + std::to_string(i)}, "U8", {0}});
        SafetensorsWriter(folder / name, table).finish();
    };
    const double took = seconds_of([&] {
        write("many", 80'000);
        CHECK(Safetensors(folder / "many").tensors().size() == 80'000);
    });
    CHECK(took < 20);  // measured: 1 s; 44 s with an algorithm that is quadratic in the number of tensors
    write("too-many", 100'001);
    check_error([&] { Safetensors file(folder / "too-many"); }, "too-many", "100001 tensors");
}

TEST_CASE("Safetensors: a header with an endless list of numbers is rejected before memory is allocated") {
    Folder folder;
    std::string header = "{\"a\":{\"dtype\":\"U8\",\"shape\":[0";
    for (int i = 0; i < 2'000'000; i++) header += ",0";
    const std::string file = folder.write("endless", only_header(header + "],\"data_offsets\":[0,0]}}"));
    check_error([&] { Safetensors s(file); }, file, "values");
}

TEST_CASE("load_corpus: a binary file of a terabyte in a folder is ignored") {
    Folder folder;
    folder.write("data/text", "some text to train on");
    folder.write("data/binary", std::string(16, '\0'));
    std::error_code unsupported;
    fs::resize_file(folder / "data/binary", uint64_t{1} << 40, unsupported);  // a sparse file
    if (unsupported) fs::resize_file(folder / "data/binary", uint64_t{1} << 36);
    const Corpus corpus = load_corpus(folder / "data");
    CHECK(corpus.train.size() + corpus.validation.size() == 21);
}

TEST_CASE("check_weights: a config.json that does not match the weights is rejected before allocation") {
    RunFolder folder;
    const std::string checkpoint = saved_checkpoint(folder / "out"), path = checkpoint + "/config.json";
    std::string config = read_file(path);
    replace(config, "\"intermediate_size\": 176", "\"intermediate_size\": 1048576");
    replace(config, "\"num_hidden_layers\": 2", "\"num_hidden_layers\": 512");
    replace(config, "\"vocab_size\": 50", "\"vocab_size\": 256");
    write_file(path, config);  // weights of 6.5 TB
    check_failed(tiny(folder, "--steps 2 --out '' --model " + checkpoint), "model.safetensors");
    check_error([&] { check_weights(checkpoint, read_model_config(checkpoint)); }, "model.safetensors");
}

TEST_CASE("load_checkpoint: a flipped bit in any tensor is detected before the model changes") {
    Folder folder;
    const std::string checkpoint = saved_checkpoint(folder / "out");
    const std::unique_ptr<Model> model = make_reference(small_setup());
    load_checkpoint(checkpoint, *model);
    auto weights = [&] {
        std::map<std::string, std::string> all;
        for (const StateTensor& t : weight_tensors(model->setup().config)) {
            all[t.name].resize(static_cast<size_t>(t.total_bytes()));
            model->read(t.name, all[t.name].data());
        }
        return all;
    };
    const auto before = weights();
    Random random(run_seed());
    for (const char* name : {"/model.safetensors", "/optimizer.safetensors"}) {
        const std::string path = checkpoint + name;
        std::string bytes = read_file(path);
        uint64_t header;
        std::memcpy(&header, bytes.data(), 8);
        const int64_t begin = static_cast<int64_t>(header) + 8,
                      body = static_cast<int64_t>(bytes.size()) - begin;
        for (int64_t i = 0; i < count(40, 20); i++) {
            const int64_t at = i == 0 ? begin : i == 1 ? begin + body - 1 : begin + random.below(body);
            bytes[static_cast<size_t>(at)] ^= 1;
            write_file(path, bytes);
            check_error([&] { load_checkpoint(checkpoint, *model); }, path);
            bytes[static_cast<size_t>(at)] ^= 1;
        }
        write_file(path, bytes);
    }
    CHECK(weights() == before);
    load_checkpoint(checkpoint, *model);
}
