// test_checkpoint_companions.cpp - data/model_folder.cpp: what a checkpoint keeps of the folder that a run
// started from: the tokenizer's files, and the fields of config.json that this program does not write.
#include <doctest/doctest.h>
#include <sys/stat.h>

#include "hugging_face_folders.h"
#include "help/program.h"

using namespace coat;
using namespace coat::test;
using namespace coat::test::hugging_face_folders;
using namespace coat::test::model_files;

namespace {

const std::vector<std::string> NAMES = {
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "vocab.json",     "merges.txt",            "tokenizer.model",         "chat_template.jinja",
    "chat_template.json", "generation_config.json"};

// Bytes that no reader of text would pass on unchanged.
std::string bytes_of(const std::string& name) { return name + std::string("\r\n\0\xFF\n\n", 6); }

// A folder of a Llama with a vocabulary of bytes, all companions, and fields that this program does not know.
HuggingFaceFolder complete_folder(const std::string& path) {
    HuggingFaceFolder f = hugging_face_llama();
    f.entries.front().shape = f.entries.back().shape = {256, 32};
    f.config["vocab_size"] = 256;
    f.config.update({{"bos_token_id", 7},
                     {"eos_token_id", {8, 9}},
                     {"_name_or_path", "someone/\u00e9"},
                     {"initializer_range", 0.02},
                     {"unknown", {{"deep", {1, nullptr, "text"}}}}});
    f.write(path);
    for (const std::string& name : NAMES) write_file(path + "/" + name, bytes_of(name));
    write_file(path + "/README.md", "not a companion");
    return f;
}

Json config_in(const std::string& folder) { return Json::parse(read_file(folder + "/config.json")); }

void check_companions(const std::string& checkpoint, const HuggingFaceFolder& f) {
    CAPTURE(checkpoint);
    for (const std::string& name : NAMES) {
        INFO(name);
        CHECK(read_file(checkpoint + "/" + name) == bytes_of(name));
    }
    CHECK(!fs::exists(checkpoint + "/README.md"));
    const Json config = config_in(checkpoint);
    for (const auto& [field, value] : f.config.items()) {
        INFO(field);
        CHECK(config.value(field, Json()) == value);
    }
    CHECK(!config.contains("pad_token_id"));  // the folder has none
    CHECK(config.at("torch_dtype") == "bfloat16");
    CHECK(config.at("architectures") == Json{"LlamaForCausalLM"});
}

// The config.json of a checkpoint whose run started from a folder with these fields.
Json merged(HuggingFaceFolder f, const Json& fields) {
    Folder folder;
    f.config.update(fields);
    f.write(folder / "model");
    MemoryModel model = model_of(folder / "model");
    const Companions companions = read_companions(folder / "model");
    return config_in(save_checkpoint(folder / "out", model, some_state(1), companions));
}

}  // namespace

TEST_CASE("checkpoint: companions and unknown fields go from the model folder to every checkpoint") {
    RunFolder folder;
    const HuggingFaceFolder f = complete_folder(folder / "model");
    require_success(tiny(folder, "--steps 2 --warmup 0 --model model"));
    check_companions(folder / "out/step-000002", f);
    // A resumed run takes them from the checkpoint.
    fs::rename(folder / "model", folder / "moved");
    const std::string first = read_file(folder / "out/step-000002/config.json");
    require_success(train(folder, "--device cpu --resume out --steps 3 --out next"));
    check_companions(folder / "next/step-000003", f);
    CHECK(read_file(folder / "next/step-000003/config.json") == first);
    // So does a run of two ranks that starts from the checkpoint's weights.
    require_success(tiny(folder, "--steps 1 --warmup 0 --ranks 2 --model next/step-000003 --out two"));
    check_companions(folder / "two/step-000001", f);
}

TEST_CASE("checkpoint: a named model has no companions, and resuming changes nothing in config.json") {
    RunFolder folder;
    require_success(tiny(folder, "--steps 1 --warmup 0"));
    const std::string checkpoint = folder / "out/step-000001";
    const std::string config = read_file(checkpoint + "/config.json");
    CHECK(std::distance(fs::directory_iterator(checkpoint), {}) == 4);
    CHECK(config_in(checkpoint).at("bos_token_id").is_null());
    require_success(train(folder, "--device cpu --resume out --steps 2 --out next"));
    CHECK(std::distance(fs::directory_iterator(folder / "next/step-000002"), {}) == 4);
    CHECK(read_file(folder / "next/step-000002/config.json") == config);
}

TEST_CASE("checkpoint: our fields of config.json win over contradictory ones of the folder") {
    const Json llama = merged(hugging_face_llama(), {{"architectures", {"LlamaModel"}},
                                                     {"torch_dtype", "float32"},
                                                     {"dtype", "float32"},
                                                     {"pad_token_id", nullptr}});
    CHECK(llama.at("architectures") == Json{"LlamaForCausalLM"});
    CHECK(llama.at("torch_dtype") == "bfloat16");
    CHECK(!llama.contains("dtype"));  // what transformers 5 calls torch_dtype
    CHECK(llama.at("rope_scaling").is_null());
    CHECK(llama.at("pad_token_id").is_null());
    CHECK(llama.at("hidden_size") == 32);
    CHECK(llama.at("model_type") == "llama");
    const Json gpt2 = merged(hugging_face_gpt2(""), {{"hidden_size", 999}, {"n_ctx", 16}});
    CHECK(gpt2.at("n_embd") == 32);
    CHECK(!gpt2.contains("hidden_size"));  // an alias of n_embd in transformers
    CHECK(gpt2.at("n_inner") == 128);
    CHECK(gpt2.at("resid_pdrop") == 0.0);
    CHECK(gpt2.at("n_ctx") == 16);
}

TEST_CASE("checkpoint: scaled frequencies and sliding windows stay as the folder spelled them") {
    using Fields = nlohmann::json;  // compares objects without the order of their fields
    const Fields linear = {{"type", "linear"}, {"factor", 2}},  // as older files have it, and an integer
                 llama3 = {{"rope_theta", 500000.0},
                           {"rope_type", "llama3"},
                           {"factor", 8.0},
                           {"low_freq_factor", 1.0},
                           {"high_freq_factor", 4.0},
                           {"original_max_position_embeddings", 8192}};
    CHECK(Fields(merged(hugging_face_llama(), {{"rope_scaling", linear}})).at("rope_scaling") == linear);
    // transformers 5 writes rope_parameters; programs that do not know it find the same in rope_scaling.
    const Fields both = merged(hugging_face_llama(), {{"rope_parameters", llama3}});
    CHECK(both.at("rope_parameters") == llama3);
    CHECK(both.at("rope_theta") == 500000.0);
    for (const auto& [field, value] : both.at("rope_scaling").items()) CHECK(llama3.at(field) == value);
    CHECK(both.at("rope_scaling").size() == 5);

    const Json mistral = merged(hugging_face_mistral(), {{"sliding_window", 4096}});
    CHECK(mistral.at("architectures") == Json{"MistralForCausalLM"});
    CHECK(mistral.at("sliding_window") == 4096);
    HuggingFaceFolder unsaid = hugging_face_mistral();
    unsaid.config.erase("sliding_window");
    CHECK(merged(unsaid, Json::object()).at("sliding_window") == 4096);  // transformers' default
    const Json fields = {{"use_sliding_window", false}, {"sliding_window", 32768}, {"max_window_layers", 21}};
    const Json qwen2 = merged(hugging_face_qwen2(), fields);
    CHECK(qwen2.at("architectures") == Json{"Qwen2ForCausalLM"});
    for (const auto& [field, value] : fields.items()) CHECK(qwen2.at(field) == value);
}

TEST_CASE("checkpoint: an unreadable companion is one sentence, and an evaluation does not read it") {
    RunFolder folder;
    complete_folder(folder / "model");
    const std::string path = folder / "model/tokenizer.json",
                      flags = TINY + "--steps 1 --warmup 0 --model model";
    auto rejected = [&] { check_rejected(folder, flags, "model/tokenizer.json"); };
    fs::remove(path);
    fs::create_directory(path);
    rejected();
    require_success(tiny(folder, "--steps 0 --model model"));
    fs::remove(path);
    REQUIRE(::mkfifo(path.c_str(), 0600) == 0);
    rejected();
    fs::remove(path);
    fs::create_symlink("nowhere", path);
    rejected();
    fs::remove(path);
    fs::create_symlink("../model/merges.txt", path);  // as in the cache of Hugging Face
    CHECK(read_companions(folder / "model").files.at("tokenizer.json") == bytes_of("merges.txt"));
    fs::remove(path);
    write_file(path, "");
    CHECK(read_companions(folder / "model").files.at("tokenizer.json").empty());
    fs::resize_file(path, 257 << 20);  // without blocks on disk
    check_error([&] { read_companions(folder / "model"); }, folder / "model", "256 MiB");
}
