# What one does with this project: `make` lists it.

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
MAKEFLAGS += --no-builtin-rules --no-print-directory
.DEFAULT_GOAL := help
.PHONY: help demo test check fuzz e2e tilt-ci bench images dev-images load tools

APPS := controller injector proxy proxy-init http-client http-server grpc-client grpc-server
TAG ?= dev
IMAGES := $(APPS:%=diy-sm-%:$(TAG))

# How images are built and loaded; the defaults are Docker's and kind's.
DOCKER_BUILD ?= docker build
LOAD ?= kind load docker-image
# make dev-images: a program that makes an image of programs, called as IMAGE NAME:TAG FILE[=PATH]...
IMAGE ?=
# Given on to the demo, to the benchmarks and to the Tiltfile.
ARGS ?=

say = @printf '\033[1m%s\033[0m\n' "$(1)"

help: ## this list
	@printf 'DIY Service Mesh: the whole mesh, small enough to read, fast enough to run.\n\n'
	@sed -nE 's/^([a-z0-9-]+):.*## (.*)/\1|\2/p' $(MAKEFILE_LIST) | while IFS='|' read -r target text; do printf '  make %-12s%s\n' "$$target" "$$text"; done
	@printf '\nFirst time here? make demo\n'

demo: tools ## watch requests go through the mesh, with no cluster and no Docker (ARGS='--for 30')
	@cargo build --bins
	@target/debug/mesh demo $(ARGS)

test: MORE := openssl:openssl c++:g++
test: tools ## every test that needs no cluster; those in namespaces need root and say so without it
	@cargo build --workspace --bins
	@cargo test --workspace

check: MORE := c++:g++
check: tools ## format, lints, documentation, licences, manifests
	$(call say,formatting)
	@cargo fmt --all --check
	$(call say,Cargo.lock is in step with the manifests)
	@cargo metadata --locked --format-version 1 >/dev/null
	$(call say,lints)
	@cargo clippy --workspace --all-targets -- -D warnings
	$(call say,documentation)
	@RUSTDOCFLAGS='-D warnings' cargo doc --workspace --no-deps
	$(call say,dependencies: licences and origins)
	@.ci/deny
	$(call say,Kubernetes manifests)
	@for folder in manifests manifests/sample-apps; do kubectl kustomize "$$folder" >/dev/null && echo "$$folder: valid"; done

fuzz: MORE := c++:g++
fuzz: tools ## hand the proxy's readers bytes that libFuzzer makes up (TARGET=detect ARGS='-max_total_time=60', or INPUT=FILE)
	@[[ " $(FUZZ_TARGETS) " == *" $(or $(TARGET),-) "* ]] || { echo "fuzz: TARGET=$(TARGET) is none of: $(FUZZ_TARGETS). For example: make fuzz TARGET=detect ARGS='-max_total_time=60'" >&2; exit 2; }
	@RUSTFLAGS='$(FUZZ_FLAGS)' cargo build --profile fuzz --target-dir $(FUZZ) --target $(HOST) -p diy-mesh-proxy-fuzz --bin fuzz-$(TARGET)
	@mkdir -p $(FUZZ)/found/$(TARGET) $(FUZZ)/corpus/$(TARGET)
	@$(FUZZ)/$(HOST)/fuzz/fuzz-$(TARGET) -artifact_prefix=$(FUZZ)/found/$(TARGET)/ $(ARGS) $(or $(INPUT),$(FUZZ)/corpus/$(TARGET) proxy/fuzz/corpus/$(TARGET))

e2e: ## the tests that need a cluster: the one that KUBECONFIG names, the images being there
	@[[ -n "$${KUBECONFIG:-}" ]] || { echo "e2e: KUBECONFIG names no cluster. With kind: export KUBECONFIG=~/.kube/config" >&2; exit 2; }
	@echo "e2e: on $$(kubectl config current-context), which gets the mesh and test namespaces"
	@kubectl rollout restart -n service-mesh deployment 2>/dev/null || true # an image of the same name may be a newer one
	@cargo test --workspace --test kubernetes --test kubernetes_authority -- --ignored
	@cargo build --bins # the tests of the command line run it
	@E2E=1 cargo test --workspace --test 'cluster_*' -- --nocapture

tilt-ci: ## the walkthrough with Tilt on a local cluster until every workload is healthy, then without it (ARGS=--network=host)
	@tilt ci -- $(ARGS)
	@tilt down --delete-namespaces -- $(ARGS)

bench: tools ## side by side with Envoy and with no proxy at all, printed as ratios
	@cargo build --config .cargo/static.toml --profile dist --bins
	@target/$(HOST)/dist/bench $(ARGS)

images: ## build all images by the Dockerfile (DOCKER_BUILD='docker build')
	@for app in $(APPS); do echo "image diy-sm-$$app:$(TAG)"; $(DOCKER_BUILD) -t "diy-sm-$$app:$(TAG)" --target "$$app" .; done

dev-images: tools ## make all images quickly, out of a cargo build (IMAGE=PROGRAM makes an image of programs)
	@[[ -n "$(IMAGE)" ]] || { echo "dev-images: say which program makes an image of programs: make dev-images IMAGE=PROGRAM; it is called as PROGRAM NAME:TAG FILE[=PATH]..." >&2; exit 2; }
	@cargo build --bins -p diy-mesh-controller -p diy-mesh-injector -p diy-mesh-proxy -p diy-mesh-proxy-init -p diy-mesh-sample-apps
	@for app in $(APPS); do files=; [[ $$app != proxy-init ]] || files="$(IPTABLES)"; $(IMAGE) "diy-sm-$$app:$(TAG)" "target/debug/$$app" $$files; done

load: ## put the images into the cluster (LOAD='kind load docker-image')
	@$(LOAD) $(IMAGES)

# The two kinds of iptables, one of which the kernel answers proxy-init.
IPTABLES := $(foreach kind,nft legacy,/usr/sbin/xtables-$(kind)-multi=/usr/sbin/xtables-$(kind)-multi)

# What `make fuzz` builds and finds: in a folder of its own, whose programs count what they run. That they are for a named platform
# leaves build scripts and macros as they are.
FUZZ := $(or $(CARGO_TARGET_DIR),target)/fuzz
FUZZ_TARGETS := $(basename $(notdir $(wildcard proxy/fuzz/targets/*.rs)))
FUZZ_FLAGS := -Cpasses=sancov-module $(addprefix -Cllvm-args=-sanitizer-coverage-,level=4 inline-8bit-counters pc-table)
HOST = $(shell rustc -vV | sed -n 's/^host: //p')

# A Rust toolchain, a C compiler for the crypto library, and what namespaces and redirect rules need. MORE is what a target needs beside
# them: fuzz targets have a C++ compiler make libFuzzer.
tools:
	@command -v cargo >/dev/null || { echo "Rust is missing. Install it as https://rustup.rs says, then try again." >&2; exit 1; }
	@need=(); \
	for pair in cc:gcc ip:iproute2 iptables-restore:iptables $(MORE); do PATH=$$PATH:/usr/sbin:/sbin command -v "$${pair%%:*}" >/dev/null || need+=("$${pair##*:}"); done; \
	(( $${#need[@]} == 0 )) && exit; \
	if [[ $$(id -u) == 0 ]] && command -v apt-get >/dev/null; then \
		echo "installing $${need[*]} with apt-get"; \
		apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$${need[@]}" >/dev/null; \
	else \
		echo "missing: $${need[*]}. Install them with your package manager (Debian, Ubuntu: sudo apt-get install $${need[*]})." >&2; exit 1; \
	fi
