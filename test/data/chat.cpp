// chat.cpp - data/chat.py: which checkpoint it opens, and what it gives the model.
#include "../help/program.h"

using namespace coat;
using namespace coat::test;

// Stand-ins for both packages: the model says what it is asked, with its folder before it.
const char* const CHAT_TRANSFORMERS = R"py(
import os
class Ids(list):
    shape = property(lambda self: (1, len(self[0])))
class Inputs(dict):
    def to(self, device): return self
class AutoTokenizer:
    eos_token_id = 0
    def from_pretrained(folder, local_files_only):
        self = AutoTokenizer()
        self.chat_template = open(os.path.join(folder, "tokenizer.json")).read()
        return self
    def __call__(self, text, return_tensors): return Inputs(input_ids=Ids([list(text)]))
    def apply_chat_template(self, messages, add_generation_prompt, return_dict, return_tensors):
        return self("|".join(m["content"] for m in messages) + ":", return_tensors)
    def decode(self, tokens, skip_special_tokens): return "".join(tokens)
class AutoModelForCausalLM:
    device = None
    def from_pretrained(folder, dtype, device_map, local_files_only):
        self = AutoModelForCausalLM()
        self.folder = folder
        return self
    def generate(self, input_ids, streamer, **more):
        print(self.folder + " says " + "".join(input_ids[0]))
        return [input_ids[0] + ["yes"]]
def TextStreamer(*of, **more): return None
)py";

PYTHON_TEST_CASE("chat.py: it talks to the newest whole checkpoint") {
    const RunFolder folder;
    require_success(tiny(folder, "--steps 3 --warmup 0 --save-every 1 --keep 9"));
    folder.write("tokens/tokenizer.json", "a template");
    const auto chat_py = [&](const std::string& flags, const std::string& typed = "hello\\nbye\\n") {
        const std::string script = fs::absolute("data/chat.py").string();
        return shell(folder, "printf '" + typed + "' | PYTHONPATH=. python3 '" + script + "' " + flags);
    };
    const auto without = [](const std::string& package) {  // also where Python has it
        return std::system(("python3 -c 'import " + package + "' > /dev/null 2>&1").c_str()) != 0;
    };
    // Without the packages it says so in a sentence. They are not needed for --help.
    if (without("torch") && without("transformers")) {
        check_failed(chat_py("out"), "lacks torch and transformers", "pip install");
        const Ended help = chat_py("--help");
        require_success(help);
        CHECK(contains(help.out, "lacks"));
    }
    folder.write("torch.py", "class cuda:\n    is_available = lambda: False\n");
    folder.write("transformers.py", CHAT_TRANSFORMERS);
    check_failed(chat_py("ou"), "ou is no folder");
    check_failed(chat_py("out"), "out/step-000003 has no tokenizer", "--tokenizer FOLDER");
    check_failed(chat_py("out --tokenizer token"), "token is no folder");
    const Ended newest = chat_py("out --tokenizer tokens");
    require_success(newest);
    CHECK(contains(newest.out, "out/step-000003 says hello:"));
    CHECK(contains(newest.out, "out/step-000003 says hello|yes|bye:"));
    CHECK(contains(chat_py("out/step-000001 --tokenizer tokens").out, "out/step-000001 says hello:"));
    // Weights that are cut off, and a checkpoint without its last file.
    const std::string weights = folder / "out/step-000003/model.safetensors";
    fs::resize_file(weights, fs::file_size(weights) - 4);
    fs::remove(folder / "out/step-000002/trainer.json");
    folder.write("out/step-000001/tokenizer.json", "");  // no template: the model continues the text
    const Ended older = chat_py("out");
    require_success(older);
    CHECK(contains(older.out, "out/step-000003 is not whole"));
    CHECK(contains(older.out, "out/step-000002 is not whole"));
    CHECK(contains(older.out, "out/step-000001 says bye\n"));
    check_failed(chat_py("tokens"), "tokens has no config.json and no whole checkpoint");
}
