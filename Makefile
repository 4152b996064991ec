# make train      the program ./train; with the GPU in it where nvcc is found, for the GPU that is found
# make test       every test; the last line is "N passed, N failed, N skipped"
# make sanitize   the same tests, smaller, under AddressSanitizer and UBSan, without the GPU
# make fuzz       random input for every reader of files, a minute each (dev/fuzz; needs clang++)
# make bench      every operator of a step and the whole step, measured on this GPU (dev/bench.cu): a table,
#                 build/bench.json and build/bench.svg
# make exercise N=3   what the judge says of dev/exercises/03-...: passed, or a hint
# make read       build/read.html: the course beside the code of the CPU, of the GPU and of the tests, as one page
# make figures    draws the figures of the course again, into build/figures/drawn (needs Python's matplotlib)
# make clean      removes what was built
#
# make NVCC= builds the CPU program where nvcc is present; GPU_ARCH=90a chooses another GPU than the one in this
# machine. OPT="-O2 -g" adds what debuggers and profilers need; the build takes 1.5 times as long.

CXX  ?= g++
NVCC ?= $(firstword $(shell command -v nvcc) $(wildcard /usr/local/cuda/bin/nvcc))
O    ?= build
OPT  ?= -O2

ifeq ($(MAKELEVEL),0)
MAKEFLAGS += -j$(shell nproc)
endif

# Contraction (a * b + c as one instruction) stays on: without it the GEMMs run at half the speed. The
# same binary gives the same bits every time; another compiler or processor may not. -ffast-math stays off: NaN
# and infinity are part of the method. On the CPU, only the reference has long loops: it is compiled with -O3.
CXXFLAGS  = -std=c++20 $(OPT) -march=native -fopenmp -fno-math-errno -Wall -Wextra -Werror

REFERENCE := reference.cpp reference_model.cpp
SOURCES := $(REFERENCE) $(sort $(filter-out program/train.cpp,$(wildcard program/*.cpp)) $(wildcard data/*.cpp) gpu/plan.cpp)
TESTS   := $(sort $(wildcard test/*.cpp test/*/*.cpp))
JUDGE   := dev/exercises/judge.cpp dev/exercises/capstone.cpp
LINK    := $(CXX) -fopenmp $(OPT)

ifneq ($(NVCC),)
CUDA         := $(abspath $(shell $(NVCC) --dryrun -x c++ -c /dev/null 2>&1 | sed -n 's/.* _HERE_=//p')/..)
# cuBLASLt's scales of rows and blocks begin with 12.9. The error comes before anything is compiled.
CUDA_RELEASE := $(shell $(NVCC) --version | sed -n 's/.*release \([0-9.]*\).*/\1/p')
ifneq ($(shell printf '12.9\n$(CUDA_RELEASE)\n' | sort -VC || echo old),)
$(error $(NVCC) is of CUDA $(or $(CUDA_RELEASE),<unknown>), but the GPU code needs CUDA 12.9 or newer: install a newer \
        toolkit, choose another nvcc with NVCC=/path/to/nvcc, or build without the GPU with "make NVCC=")
endif
endif

ifneq ($(and $(NVCC),$(wildcard model.cu)),)
# BF16 arithmetic begins with compute capability 8.0; with an older GPU, or none, the program is built for
# Hopper. -O1 is for the code of the host, which launches kernels and computes nothing; nvcc always optimizes
# kernels fully.
FOUND_ARCH := $(subst .,,$(shell nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null | head -n 1))
GPU_ARCH   ?= $(if $(filter 9% 10% 11% 12%,$(FOUND_ARCH)),$(FOUND_ARCH)a,$(if $(filter 8%,$(FOUND_ARCH)),$(FOUND_ARCH),90a))
NVCCFLAGS  := -std=c++20 -O1 $(if $(filter -g,$(OPT)),-g -lineinfo) --split-compile=0 \
              -gencode=arch=compute_$(GPU_ARCH),code=sm_$(GPU_ARCH) -Xcompiler -fopenmp,-Wall,-Wextra,-Werror -Werror all-warnings
# The slowest first: all cores work to the end.
SOURCES    := $(sort $(wildcard *.cu gpu/*.cu)) $(filter-out gpu/none.cpp gpu/plan.cpp,$(wildcard gpu/*.cpp)) $(SOURCES)
TESTS      += $(sort $(wildcard test/*.cu test/*/*.cu))
LINK       := $(NVCC) -Xcompiler -fopenmp -Xlinker -rpath=$(CUDA)/lib64
LIBRARIES  := -Xlinker --as-needed -lcublasLt -ldl
WITH_GPU   := yes
else
SOURCES    += gpu/none.cpp
endif

object  = $(patsubst %,$(O)/%.o,$(1))
OBJECTS := $(call object,$(SOURCES))

# Most of the time goes into headers: so tests of one kind are one file to the compiler, in which the first
# includes the others.
define together
TESTS := $(firstword $(1)) $(filter-out $(1),$(TESTS))
TOGETHER += $(1);
$(call object,$(firstword $(1))): $(1)
$(call object,$(firstword $(1))): private WITH := $(patsubst %,-include %,$(filter-out $(firstword $(1)),$(1)))
endef
$(foreach kind,test/model%.cpp test/reference/%.cpp test/dev/%.cpp test/train_%.cpp test/data/%.cpp,\
  $(eval $(call together,$(filter $(kind),$(TESTS)))))

PROGRAM := $(if $(filter build,$(O)),train,$(O)/train)

.PHONY: test exercise figures read bench sanitize fuzz clean need-json need-doctest need-number need-nvcc FORCE
$(PROGRAM): $(call object,program/train.cpp) $(OBJECTS)
	$(LINK) -o $@ $^ $(LIBRARIES)
# The program first: CUDA knows its kernels before the tests ask whether the GPU can run them, also before main.
$(O)/tests: $(OBJECTS) $(call object,$(TESTS) $(JUDGE))
	$(LINK) -o $@ $^ $(LIBRARIES)
test: $(PROGRAM) $(O)/tests
	OMP_WAIT_POLICY=passive COAT_TRAIN=$(abspath $(PROGRAM)) $(O)/tests $(TEST_ARGS)

# BENCH_ARGS="--model gpt2 --recipe bf16" chooses another run than those in the bench's table. A ladder:
# make build/ladder_adamw
$(O)/bench: $(call object,dev/bench.cu) $(OBJECTS)
	$(LINK) -o $@ $^ $(LIBRARIES)
$(patsubst dev/ladders/%.cu,$(O)/ladder_%,$(wildcard dev/ladders/*.cu)): $(O)/ladder_%: $(O)/dev/ladders/%.cu.o $(OBJECTS)
	$(LINK) -o $@ $^ $(LIBRARIES)
# An exercise needs the reference alone, not the GPU implementation.
EXERCISE := $(firstword $(wildcard dev/exercises/$(N)-* dev/exercises/0$(N)-*))
exercise: $(if $(EXERCISE),$(if $(filter %.cu,$(EXERCISE)),$(if $(WITH_GPU),,need-nvcc)) $(O)/exercise_$(N),need-number)
	@$(O)/exercise_$(N)
$(O)/exercise_$(N): $(call object,$(EXERCISE) $(JUDGE) reference.cpp)
	$(LINK) -o $@ $^ $(LIBRARIES)
figures: $(PROGRAM)
	@python3 -c 'import matplotlib' 2>/dev/null || \
	 { echo "The figures need Python's matplotlib: apt-get install python3-matplotlib, or pip install matplotlib." >&2; exit 1; }
	python3 dev/figures.py $(abspath $(PROGRAM)) $(O)/figures
read:
	@python3 dev/read.py $(abspath $(O))/read.html
need-number:
	@echo "Which exercise? For example: make exercise N=3" >&2; exit 1
bench: $(if $(WITH_GPU),$(O)/bench,need-nvcc)
	$(O)/bench --json $(O)/bench.json $(BENCH_ARGS)
	if grep -q '"step"' $(O)/bench.json; then python3 dev/plot.py bench $(O)/bench.json > $(O)/bench.svg; fi  # --only has no whole step
need-nvcc:
	@echo "This measures or uses a GPU and needs nvcc: install the CUDA toolkit, or give NVCC=/path/to/nvcc." >&2; exit 1

$(O)/%.cpp.o: %.cpp $(O)/flags
	@mkdir -p $(@D)
	$(CXX) $(CXXFLAGS) $(WITH) -MMD -MP -c $< -o $@
# nvcc knows where CUDA's headers are.
$(O)/gpu/%.cpp.o: gpu/%.cpp $(O)/flags
	@mkdir -p $(@D)
	$(if $(WITH_GPU),$(NVCC) $(NVCCFLAGS),$(CXX) $(CXXFLAGS)) -MMD -MP -MF $(@:.o=.d) -c $< -o $@
$(O)/%.cu.o: %.cu $(O)/flags
	@mkdir -p $(@D)
	$(NVCC) $(NVCCFLAGS) -MMD -MP -MF $(@:.o=.d) -c $< -o $@

$(call object,$(REFERENCE)): private OPT = -O3
# The other files of the host wait for files, people and the GPU: -O1 compiles them faster.
$(call object,program/train.cpp $(filter-out $(REFERENCE),$(filter %.cpp,$(SOURCES)))): private OPT = -O1
# Without kernels: nvcc then reads these files once, not for host and device.
KERNEL_FREE := model.cu $(filter-out test/dev/%,$(filter %.cu,$(TESTS)))
$(call object,$(KERNEL_FREE)): private NVCCFLAGS += -x c++
$(call object,$(TESTS)): | need-doctest
$(O)/dev/ladders/%: NVCCFLAGS += -I.
$(O)/dev/exercises/% $(O)/test/reference/%: OPT = -O1
# An exercise that is half written compiles: its warnings are shown, and the judge says what is wrong.
$(call object,$(wildcard dev/exercises/[0-9]*.cpp)): private CXXFLAGS += -Wno-error
$(call object,$(wildcard dev/exercises/[0-9]*.cu)): private NVCCFLAGS := $(filter-out -Werror all-warnings,$(NVCCFLAGS)) -Xcompiler -Wno-error
$(O)/test/%: OPT = -O0  # what takes time is in the files that they test

# It changes when the flags do, so that objects of two kinds never meet in one program.
$(O)/flags: FORCE | need-json
	@mkdir -p $(@D)
	@echo '$(CXX) $(CXXFLAGS) $(NVCC) $(NVCCFLAGS) $(WITH_GPU) $(TOGETHER)' | cmp -s - $@ || \
	 echo '$(CXX) $(CXXFLAGS) $(NVCC) $(NVCCFLAGS) $(WITH_GPU) $(TOGETHER)' > $@

# $(call need,header,package): one sentence instead of a page of errors
need = @echo '\#include <$(1)>' | $(CXX) -E -x c++ - > /dev/null 2>&1 || \
       { echo "The header $(1) is missing: install it, on Debian and Ubuntu with 'apt-get install $(2)'." >&2; exit 1; }
need-json:
	$(call need,nlohmann/json.hpp,nlohmann-json3-dev)
need-doctest:
	$(call need,doctest/doctest.h,doctest-dev)

# GCC finds uninitialized values in std::regex where there are none, once the sanitizers have changed the code.
sanitize:
	COAT_QUICK=1 UBSAN_OPTIONS=print_stacktrace=1 $(MAKE) --no-print-directory test O=build/sanitize NVCC= \
	    OPT="-O1 -g -fsanitize=address,undefined -fno-sanitize-recover=all -Wno-maybe-uninitialized"

# An input that fails is left in build/fuzz as crash-...; give it to the fuzzer as its argument to see it fail
# again.
FUZZERS      := $(patsubst dev/fuzz/%.cpp,%,$(sort $(wildcard dev/fuzz/*.cpp)))
FUZZED       := $(patsubst %.cpp,$(O)/fuzz/%.o,program/plan.cpp program/ranks.cpp gpu/none.cpp gpu/plan.cpp $(sort $(wildcard data/*.cpp)))
FUZZ_SECONDS ?= 60
FUZZ_CXX     ?= clang++ -std=c++20 -O1 -gline-tables-only -march=native -fno-sanitize-recover=all \
                -fsanitize=fuzzer,address,signed-integer-overflow,shift,bounds,integer-divide-by-zero
$(O)/fuzz/%.o: %.cpp | need-json
	@mkdir -p $(@D)
	$(FUZZ_CXX) -MMD -MP -c $< -o $@
$(O)/fuzz/fuzz_%: $(O)/fuzz/dev/fuzz/%.o $(FUZZED)
	$(FUZZ_CXX) $^ -lgomp -o $@
.SECONDARY: $(FUZZERS:%=$(O)/fuzz/dev/fuzz/%.o) $(FUZZED)  # objects stay for the next time
fuzz: $(FUZZERS:%=$(O)/fuzz/fuzz_%)
	@for target in $(FUZZERS); do mkdir -p $(O)/fuzz/corpus_$$target; \
	    $(O)/fuzz/fuzz_$$target -max_total_time=$(FUZZ_SECONDS) -max_len=4096 -rss_limit_mb=1024 -timeout=10 -print_funcs=0 -print_final_stats=1 -verbosity=0 \
	        -artifact_prefix=$(O)/fuzz/crash- $(O)/fuzz/corpus_$$target dev/fuzz/seeds/$$target || exit 1; done

clean:
	rm -rf build train

-include $(shell find $(O) -name '*.d' 2>/dev/null)
