# Development tasks: `make` lists them.

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
MAKEFLAGS += --no-builtin-rules --no-print-directory
# State for incremental builds takes a fourth of the time of a build from nothing, and gigabytes. Cargo alone, which one uses while
# changing a crate, writes it.
export CARGO_INCREMENTAL ?= 0
.DEFAULT_GOAL := help
.PHONY: help demo build build-go test test-all test-slow test-rest check fuzz fuzz-all soak floods e2e e2e-all tilt-ci bench bench-scale authorizer-image conformance conformance-image images dev-images previous-images load load-previous release release-test tools

MESH := controller injector proxy proxy-init
APPS := controller injector proxy proxy-init http-client http-server grpc-client grpc-server
TAG ?= dev
# make demo: the crates with the programs that the demo runs.
PROGRAMS := diy-mesh $(MESH:%=diy-mesh-%) diy-mesh-sample-apps
IMAGES := $(APPS:%=diy-sm-%:$(TAG))

# make previous-images: the commits of previous releases. The tags of their images are the first twelve digits.
PREVIOUS := $(shell cat tests/previous-releases)
# make conformance: version of the Gateway API. Empty: that of tests/conformance/go.mod; X: that of tests/conformance/go-X.mod.
GATEWAY_API ?=

# How images are built and loaded; the defaults are Docker's and kind's.
DOCKER_BUILD ?= docker build
LOAD ?= kind load docker-image
# make dev-images: program that builds an image from files, called as IMAGE NAME:TAG FILE[=PATH]...
IMAGE ?=
# Arguments for the demo, the benchmark and the Tiltfile.
ARGS ?=
# Where cargo puts its output.
TARGET_DIR := $(or $(CARGO_TARGET_DIR),target)
# make release: the version, and the folder of the files.
VERSION := $(shell sed -nE '/^\[workspace\.package\]/,/^\[/s/^version = "(.*)"/\1/p' Cargo.toml)
OUT ?= $(TARGET_DIR)/release-$(VERSION)

say = @printf '\033[1m%s\033[0m\n' "$(1)"

help: ## this list
	@printf 'DIY Service Mesh: the whole mesh, small enough to read, fast enough to run.\n\n'
	@sed -nE 's/^([a-z0-9-]+):.*## (.*)/\1|\2/p' $(MAKEFILE_LIST) | while IFS='|' read -r target text; do printf '  make %-18s%s\n' "$$target" "$$text"; done
	@printf '\nFirst time here? make demo\n'

demo: tools ## run the mesh in a sandbox, without cluster and Docker (ARGS='--for 30')
	@cargo build --bins $(PROGRAMS:%=-p %)
	@$(TARGET_DIR)/debug/mesh demo $(ARGS)

build: tools ## compile all programs and tests
	@cargo build --workspace --bins
	@cargo test --workspace --no-run

build-go: ## compile the programs in Go that the tests use
	@cd tests/helm && go tool helm version >/dev/null
	@cd tests/authorizer && CGO_ENABLED=0 go build -trimpath -o /dev/null .
	@cd tests/conformance && CGO_ENABLED=0 go build -trimpath -o /dev/null ./echo
	@cd tests/conformance && go test -modfile=$(GO_MOD) -c -o /dev/null .

test: tools ## run the tests of all crates, and a sandbox test of each feature; tests that lack a program or root are skipped and counted
	@cargo build --bins $(PROGRAMS:%=-p %)
	@SANDBOX_TESTS='$(FEATURES)' .ci/totals cargo test $(RUNNER) --workspace --exclude diy-mesh-bench --exclude diy-mesh-proxy-fuzz --lib $(addprefix --test ,$(filter-out memory authority rbac,$(COMPONENT_TESTS)) tidy documents sandbox) --no-fail-fast

test-all: MORE := curl:curl ip:iproute2 iptables-restore:iptables openssl:openssl nft:nftables c++:g++ valgrind:valgrind promtool:prometheus chromium:chromium
test-all: tools ## run all tests that need no cluster; tests in namespaces need root (QUOTA=25: with this percentage of the CPU; TESTS='--test sandbox')
	@cargo build --workspace --bins
	@.ci/totals cargo test $(RUNNER) $(or $(TESTS),--workspace) --no-fail-fast

test-slow: ## run the tests of components, memory, fuzz inputs, sandboxes and the tutorial with a quarter of the CPU, as root (QUOTA=25)
	@$(MAKE) test-all QUOTA=$(or $(QUOTA),25) TESTS='--workspace $(SLOW_TESTS:%=--test %)'

test-rest: ## run the other tests of test-all: unit tests, documents, tools
	@$(MAKE) test-all TESTS='--workspace --exclude diy-mesh-proxy-fuzz --lib --bins $(filter-out $(SLOW_TESTS:%=--test=%),$(ALL_TESTS:%=--test=%))'

RUNNER = --config 'target."cfg(unix)".runner=[$(QUOTA:%="$(CURDIR)/.ci/quota","%",)"$(CURDIR)/.ci/test-program"]'
COMPONENT_TESTS := $(basename $(notdir $(wildcard $(foreach component,proxy controller injector proxy-init sample-apps,$(component)/tests/*.rs))))
SLOW_TESTS := $(COMPONENT_TESTS) memory corpus sandbox tutorial
ALL_TESTS := $(sort $(basename $(notdir $(wildcard */tests/*.rs))) $(notdir $(patsubst %/main.rs,%,$(wildcard */tests/*/main.rs))))
# make test: modules of the sandbox tests. The others repeat, measure, or need further programs.
FEATURES := authorization basics commands connections exceptions identity policies probes resilience routes smi strict traffic walkthrough

check: MORE := c++:g++
check: tools ## check format, lints, documentation, licences, manifests, workflows
	$(call say,formatting)
	@cargo fmt --all --check
	$(call say,Cargo.lock is up to date)
	@cargo metadata --locked --format-version 1 >/dev/null
	$(call say,lints)
	@cargo clippy --workspace --all-targets -- -D warnings
	$(call say,documentation)
	@RUSTDOCFLAGS='-D warnings' cargo doc --workspace --no-deps
	$(call say,dependencies: licences and sources)
	@.ci/deny
	$(call say,Kubernetes manifests)
	@for folder in manifests/crds manifests manifests/sample-apps; do kubectl kustomize "$$folder" >/dev/null && echo "$$folder: valid"; done
	$(call say,workflows)
	@.ci/actionlint

fuzz: MORE := c++:g++
fuzz: tools ## fuzz the proxy's parsers with libFuzzer (TARGET=detect ARGS='-max_total_time=60', or INPUT=FILE)
	@[[ " $(FUZZ_TARGETS) " == *" $(or $(TARGET),-) "* ]] || { echo "fuzz: unknown TARGET=$(TARGET), expected one of: $(FUZZ_TARGETS). Example: make fuzz TARGET=detect ARGS='-max_total_time=60'" >&2; exit 2; }
	@$(BUILD_FUZZ) --bin fuzz-$(TARGET)
	@mkdir -p $(FUZZ)/found/$(TARGET) $(FUZZ)/corpus/$(TARGET)
	@$(FUZZ_PROGRAMS)/fuzz-$(TARGET) -artifact_prefix=$(FUZZ)/found/$(TARGET)/ $(ARGS) $(or $(INPUT),$(FUZZ)/corpus/$(TARGET) proxy/fuzz/corpus/$(TARGET))

fuzz-all: MORE := c++:g++
fuzz-all: tools ## fuzz all parsers for some seconds of all cores together (SECONDS=300; FUZZ_PROFILE=dev compiles faster than it runs)
	@$(BUILD_FUZZ) --bin 'fuzz-*'
	@.ci/fuzz-all $(FUZZ) $(FUZZ_PROGRAMS) $(or $(SECONDS),300) $(FUZZ_TARGETS)

e2e: ## run the cluster tests on the cluster of KUBECONFIG, which needs the images
	@[[ -n "$${KUBECONFIG:-}" ]] || { echo "e2e: KUBECONFIG is not set. With kind: export KUBECONFIG=~/.kube/config" >&2; exit 2; }
	@echo "e2e: on $$(kubectl config current-context), installing the mesh and test namespaces"
	@kubectl rollout restart -n service-mesh deployment 2>/dev/null || true # the images may have changed under the same tag
	@kubectl apply -k manifests/crds >/dev/null
	@# kubectl wait fails at once if the definition has no status yet.
	@timeout 60 sh -c 'until kubectl wait --for=condition=Established --timeout=60s crd/trafficpolicies.diy-service-mesh.dev crd/authorizationpolicies.diy-service-mesh.dev; do sleep 0.3; done'
	@cargo build --workspace --bins # the command line tests run these programs
	@.ci/totals cargo test --workspace --test kubernetes --test kubernetes_authority -- --ignored
	@E2E=1 .ci/totals cargo test --workspace --test cluster -- --test-threads=4
	@E2E=1 .ci/totals cargo test --workspace --test cluster_serial -- --test-threads=1

e2e-all: ## build the images, run all tests on the cluster of KUBECONFIG, record the result in docs/reliability.md (DOCKER_BUILD=, LOAD=)
	@.ci/e2e-all

floods: ## flood the proxy in memory control groups with each limit: alone and all together, as root
	@.ci/totals cargo test -p diy-mesh-proxy --test memory -- --ignored

soak: ## mixed traffic while everything changes, in a sandbox, as root (MINUTES=60)
	@cargo build --workspace --bins
	@MINUTES=$(or $(MINUTES),60) .ci/totals cargo test -p diy-mesh-tests --test sandbox soak -- --ignored --nocapture

conformance-image: ## build the image for make conformance with Go (DOCKER_BUILD='docker build', or IMAGE=PROGRAM)
	@mkdir -p $(TARGET_DIR)/conformance
	@cd tests/conformance && CGO_ENABLED=0 go build -trimpath -o $(abspath $(TARGET_DIR))/conformance/client ./echo
	@$(or $(IMAGE:%=% diy-sm-conformance:dev $(TARGET_DIR)/conformance/client),$(DOCKER_BUILD) -t diy-sm-conformance:dev -f tests/conformance/Dockerfile $(TARGET_DIR)/conformance)

authorizer-image: ## build the authorization server of make e2e with Go (DOCKER_BUILD='docker build', or IMAGE=PROGRAM)
	@mkdir -p $(TARGET_DIR)/authorizer
	@cd tests/authorizer && CGO_ENABLED=0 go build -trimpath -o $(abspath $(TARGET_DIR))/authorizer/authorizer .
	@$(or $(IMAGE:%=% diy-sm-authorizer:dev $(TARGET_DIR)/authorizer/authorizer),$(DOCKER_BUILD) -t diy-sm-authorizer:dev -f tests/authorizer/Dockerfile $(TARGET_DIR)/authorizer)

conformance: ## run the Gateway API's conformance tests for meshes on the cluster of KUBECONFIG, which needs the images (GATEWAY_API=, ARGS='-run-test MeshSplit')
	@cd tests/conformance && go mod download -modfile=$(GO_MOD) sigs.k8s.io/gateway-api
	@kubectl apply --server-side --force-conflicts -f "$$(cd tests/conformance && go list -modfile=$(GO_MOD) -m -f '{{.Dir}}' sigs.k8s.io/gateway-api)/config/crd/standard" >/dev/null
	@kubectl apply -k manifests/crds >/dev/null
	@kubectl apply -k manifests >/dev/null
	@for part in controller injector; do kubectl rollout status -n service-mesh "deployment/$$part" --timeout=180s; done
	@cd tests/conformance && go test -modfile=$(GO_MOD) -count=1 -timeout 30m -v . -args $(ARGS)

GO_MOD := go$(GATEWAY_API:%=-%).mod

tilt-ci: ## deploy with Tilt to a local cluster, wait until all workloads are healthy, clean up (ARGS=--network=host)
	@tilt ci -- $(ARGS)
	@tilt down --delete-namespaces -- $(ARGS)

bench: MORE := ip:iproute2 iptables-restore:iptables haproxy:haproxy
bench: tools ## compare with Envoy, HAProxy and direct connections, print ratios
	@cargo build --config .cargo/static.toml --profile dist --bins
	@$(TARGET_DIR)/$(HOST)/dist/bench $(ARGS)

bench-scale: tools ## measure the control plane with 100 to 5,000 subscribed proxies, next to its goals
	@cargo build --config .cargo/static.toml --profile dist --bin controller --bin injector --bin scale
	@$(TARGET_DIR)/$(HOST)/dist/scale $(ARGS)

images: ## build all images with the Dockerfile (DOCKER_BUILD='docker build')
	@for app in $(APPS); do echo "image diy-sm-$$app:$(TAG)"; $(DOCKER_BUILD) -t "diy-sm-$$app:$(TAG)" --target "$$app" .; done
	@$(DOCKER_BUILD) -t "diy-sm-proxy-init:$(TAG)-iptables" --target proxy-init-iptables .

dev-images: tools ## build all images from the programs of make test-all, faster than images (IMAGE=PROGRAM)
	@[[ -n "$(IMAGE)" ]] || { echo "dev-images: IMAGE is not set. Run: make dev-images IMAGE=PROGRAM, which is called as PROGRAM NAME:TAG FILE[=PATH]..." >&2; exit 2; }
	@cargo build --workspace --bins # a smaller selection has other features and compiles most crates again
	@for app in $(APPS); do $(IMAGE) "diy-sm-$$app:$(TAG)" "$(TARGET_DIR)/debug/$$app"; done

previous-images: ## build the mesh's images of the commits in tests/previous-releases
	@rm -rf $(TARGET_DIR)/previous
	@for commit in $(PREVIOUS); do \
		folder=$(TARGET_DIR)/previous/$$commit; mkdir -p $$folder; \
		git archive $$commit | tar -xm -C $$folder; \
		CARGO_TARGET_DIR=$(abspath $(TARGET_DIR))/previous-target $(MAKE) -C $$folder $(if $(IMAGE),dev-images IMAGE=$(IMAGE),images) TAG=$${commit:0:12} APPS='$(MESH)'; \
	done

load: ## load the images into the cluster (LOAD='kind load docker-image')
	@$(LOAD) $(IMAGES)

load-previous: ## load the images of the previous releases into the cluster (LOAD='kind load docker-image')
	@for commit in $(PREVIOUS); do $(LOAD) $(MESH:%=diy-sm-%:$${commit:0:12}); done

release: tools ## build the files of a release (OUT=, TARGET=, SIGNING_KEY=, DOCKER_BUILD=; without Docker: IMAGES=), see docs/versions.md
	@.ci/release "$(VERSION)" "$(OUT)"

release-test: ## install the release in OUT by the commands of README.md in a container, as root
	@cargo build --workspace --bins
	@CI=true RELEASE="$(abspath $(OUT))" .ci/totals cargo test --workspace --test release -- --nocapture

# make fuzz: counters of coverage in the crates of the workspace, in programs of a profile.
FUZZ := $(TARGET_DIR)/fuzz
FUZZ_TARGETS := $(basename $(notdir $(wildcard proxy/fuzz/targets/*.rs)))
FUZZ_PROFILE ?= fuzz
FUZZ_PROGRAMS = $(TARGET_DIR)/$(FUZZ_PROFILE:dev=debug)
BUILD_FUZZ = RUSTC_WORKSPACE_WRAPPER=$(CURDIR)/.ci/fuzz-rustc cargo build --profile $(FUZZ_PROFILE) --workspace
HOST = $(shell rustc -vV | sed -n 's/^host: //p')

# Installs required tools: a C compiler for the crypto library. MORE lists further PROGRAM:PACKAGE pairs of a target,
# such as a C++ compiler for libFuzzer.
tools:
	@command -v cargo >/dev/null || { echo "Rust not found. Install it from https://rustup.rs, then try again." >&2; exit 1; }
	@need=(); \
	for pair in cc:gcc $(MORE); do PATH=$$PATH:/usr/sbin:/sbin command -v "$${pair%%:*}" >/dev/null || need+=("$${pair##*:}"); done; \
	(( $${#need[@]} == 0 )) && exit; \
	if [[ $$(id -u) == 0 ]] && command -v apt-get >/dev/null; then \
		echo "installing $${need[*]} with apt-get"; \
		apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$${need[@]}" >/dev/null; \
	else \
		echo "missing: $${need[*]}. Install them with your package manager (Debian, Ubuntu: sudo apt-get install $${need[*]})." >&2; exit 1; \
	fi
