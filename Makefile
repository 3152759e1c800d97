# Each target also works as the plain command that it prints. Go downloads the toolchain that go.mod names by itself.
SHELL       := /bin/bash
VERSION     := v$(shell cat VERSION)
LDFLAGS     := -s -w -X main.version=$(VERSION)
# The directory of the programs that test/programs/build.sh builds. KUBERNETES=1.36 builds and runs that release instead of
# the newest one.
PROGRAMS    := $(or $(OXIDE_CSI_PROGRAMS),$(or $(XDG_CACHE_HOME),$(HOME)/.cache)/oxide-csi-plugin/programs$(KUBERNETES:%=-%))
ifdef KUBERNETES
export KUBERNETES
export OXIDE_CSI_PROGRAMS := $(PROGRAMS)
endif
# Debian packages: the tools that the node plugin calls, D-Bus and curl for tests, and the C compiler that the race detector
# needs.
PACKAGES    := e2fsprogs xfsprogs btrfs-progs cryptsetup-bin dmsetup util-linux mount dbus-daemon curl gcc libc6-dev ca-certificates
# For the guest of test-vm: QEMU, and the parts of the guest.
VM_PACKAGES := qemu-system-x86 busybox-static cpio kmod
# For the nodes of e2e-k8s.
K8S_PACKAGES := containerd runc containernetworking-plugins iproute2 busybox-static
# For the clients of e2e-nomad: a root directory for tasks, and the libraries of Debian's dockerd.
NOMAD_PACKAGES := busybox-static containerd runc libdevmapper1.02.1 libsystemd0

.PHONY: help
help: ## show this list
	@grep -hE '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  %-20s %s\n", $$1, $$2}'

.PHONY: deps
deps: ## install the Debian packages that demo and test need
	@test/deps.sh $(PACKAGES)

.PHONY: build
build: ## build the plugin, the COSI driver and the simulated rack into bin/
	CGO_ENABLED=0 go build -trimpath -ldflags "$(LDFLAGS)" -o bin/ ./cmd/oxide-csi ./cmd/oxide-cosi ./cmd/oxide-sim

.PHONY: version
version: ## write the version of the file VERSION to the chart, the manifests, the job files and the pages
	go test ./test/repo -run '^TestVersion$$' -count=1 -update

# The image names in the manifests, and the programs that the node plugin calls.
IMAGE            ?= oxidecomputer/oxide-csi-plugin:$(VERSION)
CONTROLLER_IMAGE ?= oxidecomputer/oxide-csi-controller:$(VERSION)
IMAGE_TOOLS      := blkid btrfs cryptsetup dd dmsetup e2fsck mkfs.btrfs mkfs.ext3 mkfs.ext4 mkfs.xfs mount resize2fs wipefs xfs_growfs
IMAGE_FLAGS      := -user 65532:65532 -label org.opencontainers.image.title=oxide-csi -label org.opencontainers.image.version=$(VERSION) \
	-label org.opencontainers.image.source=https://github.com/oxidecomputer/oxide-csi-plugin -label org.opencontainers.image.licenses=MPL-2.0

.PHONY: image
image: deps build ## build both container images, node and controller, as bin/*.tar on a Debian, without a daemon
	go run ./deploy/image -o bin/oxide-csi-plugin.tar -program bin/oxide-csi -tag $(IMAGE) $(IMAGE_FLAGS) $(IMAGE_TOOLS)
	go run ./deploy/image -o bin/oxide-csi-controller.tar -program bin/oxide-csi -tag $(CONTROLLER_IMAGE) $(IMAGE_FLAGS) -certificates

COSI_IMAGE ?= oxidecomputer/oxide-cosi:$(VERSION)

.PHONY: image-cosi
image-cosi: deps build ## build the container image of the COSI driver as bin/oxide-cosi.tar on a Debian, without a daemon
	go run ./deploy/image -o bin/oxide-cosi.tar -program bin/oxide-cosi -tag $(COSI_IMAGE) $(IMAGE_FLAGS) -certificates

.PHONY: image-load
image-load: image ## load both images into docker, podman or buildah of this machine; for nodes: docs/how-to/kubernetes.md, Images
	deploy/image/load.sh bin/oxide-csi-plugin.tar bin/oxide-csi-controller.tar

.PHONY: image-roots
image-roots: deps build ## put the files of both images into bin/image, for the Dockerfile
	rm -rf bin/image
	mkdir -p bin/image
	go run ./deploy/image -root bin/image/node -program bin/oxide-csi $(IMAGE_TOOLS)
	go run ./deploy/image -root bin/image/controller -program bin/oxide-csi -certificates

# Racks have x86-64 processors. The other platforms are for people who run commands on their own machine.
PLATFORMS ?= linux/amd64,linux/arm64,darwin/arm64

.PHONY: release
release: deps ## make all files of a release in dist/: programs, images, chart, manifests, job files, licences, SBOMs, checksums
	test/programs/build.sh helm
	rm -rf dist
	go run ./deploy/release -o dist -version $(VERSION) -ldflags "$(LDFLAGS)" -image-flags "$(IMAGE_FLAGS)" \
		-kustomize $(PROGRAMS)/kustomize -platforms $(PLATFORMS) $(IMAGE_TOOLS)

.PHONY: sign-release
sign-release: ## sign the checksums of dist/ with KEY, a private key of cosign, which is built once into a cache
	test/programs/build.sh cosign
	test/release/sign.sh $(PROGRAMS)/cosign "$(KEY)" dist

.PHONY: verify-release
verify-release: deps ## build the release of the last commit twice, compare both byte for byte, and check what is in it
	test/programs/build.sh helm cosign
	PLATFORMS=$(PLATFORMS) test/release/verify.sh

.PHONY: test-release
test-release: ## check the release in dist/, and install from its files alone what needs no cluster
	test/programs/build.sh helm
	OXIDE_RELEASE=$(CURDIR)/dist OXIDE_CSI_PROGRAMS=$(PROGRAMS) go test -tags=release -count=1 -v ./deploy/release ./test/release

# Runs tests with the files of the release in dist/ in the place of the repository's own.
WITH_RELEASE := OXIDE_RELEASE=$(CURDIR)/dist go run ./test/all -exec=$(CURDIR)/test/release/inplace.sh -count=1

.PHONY: e2e-release
e2e-release: release ## follow all tutorials with the files of a release alone, on systemd, Nomad and Kubernetes; as root
	@test/deps.sh $(PACKAGES) $(K8S_PACKAGES) $(NOMAD_PACKAGES) systemd dbus
	test/programs/build.sh cluster sidecars helm nomad docker versitygw
	$(WITH_RELEASE) -run='Tutorial$$' ./cmd/oxide-sim
	$(WITH_RELEASE) -tags=systemd -run='^TestTutorial$$' ./test/systemd
	$(WITH_RELEASE) -tags=nomad,release -run='^(TestTutorial|TestRelease)$$' ./test/nomad
	$(WITH_RELEASE) -tags=k8s,buckets,release -run='^(TestTutorial|TestBuckets|TestRelease)$$' ./test/k8s

.PHONY: print-image-tools
print-image-tools:
	@echo $(IMAGE_TOOLS)

.PHONY: demo
demo: deps build ## show the life of two volumes on a simulated rack, as racks are today
	bin/oxide-sim demo

.PHONY: demo-hotplug
demo-hotplug: deps build ## show the same on a rack with hot-plug, which no rack has yet
	bin/oxide-sim demo --hotplug

.PHONY: demo-buckets
demo-buckets: build ## show one bucket's whole life on a gateway with the COSI driver; without root
	test/programs/build.sh versitygw
	go run ./test/buckets/demo

.PHONY: test
test: deps ## run all tests, with RACE=1 with the race detector; as root with real disks and mounts
	test/programs/build.sh versitygw
	go run ./test/all

# A revision of which the version alone differs.
FROM ?= HEAD

.PHONY: test-skew
test-skew: deps ## run the controller of revision FROM (HEAD) with this node plugin and the reverse, on real devices; as root
	test/blackbox/skew.sh $(FROM)

.PHONY: test-vm
test-vm: ## test the node plugin on a real kernel with NVMe disks, in a QEMU guest
	@test/deps.sh $(PACKAGES) $(VM_PACKAGES)
	go run ./test/all -tags=vm -count=1 -timeout=40m ./test/vm

.PHONY: test-matrix
test-matrix: deps ## run the tests of the node with the tools of Debian 11 and 13, in root directories of their packages; by hand, as root
	test/matrix/run.sh bullseye
	test/matrix/run.sh trixie

.PHONY: test-matrix-guests
test-matrix-guests: ## take volumes between QEMU guests with the kernels of KERNELS and the tools of RELEASES; by hand, as root
	@test/deps.sh $(PACKAGES) $(VM_PACKAGES)
	test/matrix/guests.sh

.PHONY: test-identity
test-identity: deps ## read a node's identity from a real Kubernetes API server and Nomad agent, built once into a cache
	test/programs/build.sh kubernetes nomad
	go run ./test/all -tags=identity -count=1 ./test/identity

.PHONY: e2e-k8s
e2e-k8s: e2e-k8s-hotplug e2e-k8s-restart ## test the manifests and the chart in a real Kubernetes: the two below

.PHONY: e2e-k8s-hotplug
e2e-k8s-hotplug: ## the part on racks with hot-plug; its programs are built once into a cache; as root
	@test/deps.sh $(PACKAGES) $(K8S_PACKAGES)
	test/programs/build.sh cluster sidecars helm
	go run ./test/all -tags=k8s -count=1 -timeout=30m -run='^TestKubernetes$$' ./test/k8s

.PHONY: e2e-k8s-restart
e2e-k8s-restart: ## the part on a rack without hot-plug, with restarts of the nodes, and the tutorial; as root
	@test/deps.sh $(PACKAGES) $(K8S_PACKAGES)
	test/programs/build.sh cluster sidecars
	go run ./test/all -tags=k8s -count=1 -timeout=30m -skip='^TestKubernetes$$' ./test/k8s

.PHONY: e2e-k8s-conformance
e2e-k8s-conformance: ## run Kubernetes' own storage tests on the same cluster, or those that match FOCUS; as root
	@test/deps.sh $(PACKAGES) $(K8S_PACKAGES)
	test/programs/build.sh cluster sidecars conformance
	go run ./test/all -tags=k8s,conformance -count=1 -timeout=60m -run=TestConformance ./test/k8s

.PHONY: e2e-k8s-sample
e2e-k8s-sample: ## run a quick one of each kind of these tests; as root
	$(MAKE) e2e-k8s-conformance FOCUS=sample

.PHONY: e2e-stories
e2e-stories: ## break volumes in twenty ways, make 24 mistakes and 31 waits on the same cluster, and read what it says; as root
	@test/deps.sh $(PACKAGES) $(K8S_PACKAGES)
	test/programs/build.sh cluster sidecars
	go run ./test/all -tags=k8s,stories -count=1 -timeout=60m -run='^(TestStories|TestKubernetesSays|TestSymptomRows|TestPlannedRestart|TestSidecarMemory)$$' ./test/k8s

.PHONY: e2e-upgrade
e2e-upgrade: ## upgrade manifests and chart on the same cluster, and go back, while a pod writes; as root
	@test/deps.sh $(PACKAGES) $(K8S_PACKAGES)
	test/programs/build.sh cluster sidecars helm
	go run ./test/all -tags=k8s,upgrade -count=1 -timeout=30m -run=TestUpgrade ./test/k8s

.PHONY: e2e-platform
e2e-platform: ## install the chart on the same cluster where kubelet has another directory; as root
	@test/deps.sh $(PACKAGES) $(K8S_PACKAGES)
	test/programs/build.sh cluster sidecars helm
	go run ./test/all -tags=k8s,platform -count=1 -timeout=30m -run=TestKubeletFolder ./test/k8s

.PHONY: e2e-buckets
e2e-buckets: ## test buckets in a real Kubernetes: claim, access, a workload, a gateway that moves; as root
	@test/deps.sh $(PACKAGES) $(K8S_PACKAGES)
	test/programs/build.sh cluster sidecars helm versitygw
	go run ./test/all -tags=k8s,buckets -count=1 -timeout=30m -run=TestBuckets ./test/k8s

.PHONY: e2e-nomad
e2e-nomad: ## test the job files on a real Nomad with two clients, built once into a cache; as root
	@test/deps.sh $(PACKAGES) $(NOMAD_PACKAGES)
	test/programs/build.sh nomad docker versitygw
	# The parallel tests wait for Nomad's default timings most of the time.
	go run ./test/all -tags=nomad -count=1 -timeout=30m -parallel=3 ./test/nomad

.PHONY: test-systemd
test-systemd: ## test the units under a real systemd in its own namespaces; as root
	@test/deps.sh $(PACKAGES) systemd dbus
	go run ./test/all -tags=systemd -count=1 $(SYSTEMD_FLAGS) ./test/systemd

.PHONY: test-systemd-short
test-systemd-short: SYSTEMD_FLAGS = -short
test-systemd-short: test-systemd ## the same with one reboot instead of ten; as root

.PHONY: test-helm
test-helm: deps ## render the chart, compare it with the manifests, and install it into a real API server; helm is built once into a cache
	test/programs/build.sh helm kubernetes
	go run ./test/all -tags=helm -count=1 ./test/helm

.PHONY: test-monitoring
test-monitoring: deps ## test the alerts and the dashboard with a real Prometheus and promtool, built once into a cache
	test/programs/build.sh prometheus
	go run ./test/all -tags=monitoring -count=1 ./test/monitoring

# A number of inputs takes a minute or more. With a time instead, go test may report the end of the time as a failure.
FUZZTIME ?= 50000x

.PHONY: fuzz
fuzz: deps ## fuzz the scanner that proves disks blank, for FUZZTIME (50000x, or a time); as root
	@test "$$(id -u)" = 0 || { echo "fuzz: needs root: loop devices and device nodes"; exit 1; }
	go test ./core/device -run '^$$' -fuzz '^FuzzProveBlank$$' -fuzztime $(FUZZTIME)

.PHONY: model
model: ## find all states of planned restarts in small scenarios, in larger ones too with MODEL=10m (1m)
	set -o pipefail; go test ./core/restart -run TestModel -v -count=1 -timeout=60m -model=$(MODEL) | grep -Ev '^(=== |PASS)|--- PASS| states in '

ORDERS ?= -orders

.PHONY: orders
orders: ## explore all orders of the requests of an expansion and another call, or with ORDERS= those of make test; and controllers that end during deferred detaches
	RACE= go test ./core/controller -run 'TestExpansion|TestDeferredDetachesWhenControllersEnd' -count=1 -timeout=60m $(ORDERS)

.PHONY: model-states
model-states: ## find the states of all scenarios and write their numbers to core/restart/testdata/states.txt
	go test ./core/restart -run 'TestModel$$|TestModelStates' -count=1 -timeout=60m -model=1h -update

.PHONY: mutate
mutate: deps ## plant each bug of test/mutate and expect that its test fails; as root
	test/programs/build.sh versitygw
	RACE= go run ./test/mutate

.PHONY: mutate-sample
mutate-sample: deps ## plant five of these bugs, chosen by the commit's hash; as root
	test/programs/build.sh versitygw
	RACE= go run ./test/mutate -sample 5 -seed "$$(git rev-parse HEAD)"

.PHONY: chaos
chaos: chaos-node chaos-controller chaos-restart chaos-nomad chaos-buckets ## all tests that kill the plugin or the COSI driver: those below

.PHONY: chaos-node
chaos-node: deps ## kill the node plugin at hundreds of its steps; as root
	go run ./test/kill

DURATION ?= 2m
MODEL ?= 1m

.PHONY: chaos-controller
chaos-controller: deps ## many clients for DURATION (2m) with rack faults and killed rack and controller; as root with data
	go run ./test/chaos -duration $(DURATION)

.PHONY: chaos-restart
chaos-restart: deps ## planned restarts for DURATION (2m) with rack faults and killed rack and controllers
	go run ./test/chaos -restarts -faults 0.04 -kills 8s -duration $(DURATION)

.PHONY: chaos-owners
chaos-owners: deps ## the same with owners who stop, start, delete and replace instances at any moment, and many clients with a proof by lists after each OK; by hand
	go run ./test/chaos -restarts -owners -faults 0.04 -kills 8s -duration $(DURATION)
	go run ./test/chaos -proofs -duration $(DURATION)

.PHONY: chaos-nomad
chaos-nomad: DURATION = 30s
chaos-nomad: deps ## what Nomad asks, on a rack with hot-plug and on one without, each for DURATION (30s): unpublishes early, late or never, rack faults, killed rack and controller
	go run ./test/chaos -nomad -faults 0.04 -kills 6s -duration $(DURATION)
	go run ./test/chaos -nomad -restarts -faults 0.04 -kills 6s -duration $(DURATION)

.PHONY: chaos-buckets
chaos-buckets: DURATION = 30s
chaos-buckets: build ## many clients of the COSI driver for DURATION (30s) with faults and killed driver and gateway
	test/programs/build.sh versitygw
	go run ./test/buckets/chaos -duration $(DURATION)

.PHONY: lint
lint: ## run golangci-lint with .golangci.yaml, built once into a cache, and actionlint on the workflows
	test/programs/build.sh lint
	$(PROGRAMS)/golangci-lint run
	$(PROGRAMS)/golangci-lint run --build-tags=noplugin --tests=false ./cmd/oxide-csi ./admin
	go run github.com/rhysd/actionlint/cmd/actionlint@v1.7.12

.PHONY: prose
prose: ## check the sentences and words of the pages with vale, built once into a cache
	@test/deps.sh gcc libc6-dev
	test/programs/build.sh prose
	test/prose/check.sh $(PROGRAMS)/vale

.PHONY: size
size: ## print how much there is to read: linked lines, long functions and files, words by page
	go run ./test/size

.PHONY: findings
findings: ## show again what surprised us about public tools and libraries: all scripts of findings/; as root
	@for script in findings/*.sh; do echo "== $$script"; $$script || failed="$$failed $$script"; done; \
		[ -z "$$failed" ] || { echo "changed:$$failed" >&2; exit 1; }

.PHONY: outdated
outdated: ## compare the pinned modules and programs with the newest in the module proxy; fails if one is two minor versions behind
	go run ./test/outdated

.PHONY: fmt
fmt: ## format all Go files as lint requires
	test/programs/build.sh lint
	$(PROGRAMS)/golangci-lint fmt

.PHONY: bench
bench: ## measure time and memory, also of the bare SDK; with PEERS=DIRECTORY (bench/main.go) beside other drivers; writes bench/results.json
	@test/deps.sh linux-perf
	go run ./bench
	$(if $(PEERS),go run ./bench -peers $(PEERS))

.PHONY: bench-short
bench-short: ## measure what needs few seconds: API calls, latency, start, memory, size of the program; fails if a count differs from bench/results.json
	go run ./bench -compare -run '^(calls|latency|startup|identity|memory|binary)$$'

.PHONY: bench-counts
bench-counts: ## write what bench-short compares to bench/results.json: API calls, size of the program
	go run ./bench -counts -run '^(calls|binary)$$'

.PHONY: bench-nomad
bench-nomad: ## measure a redeployment and a move on a real Nomad for five minutes; writes bench/results.json; as root
	@test/deps.sh $(PACKAGES) $(NOMAD_PACKAGES)
	test/programs/build.sh nomad docker
	go run ./bench -nomad

.PHONY: bench-upgrade
bench-upgrade: ## measure an upgrade and a rollback on a real Kubernetes for five minutes; writes bench/results.json; as root
	@test/deps.sh $(PACKAGES) $(K8S_PACKAGES)
	test/programs/build.sh cluster sidecars helm
	go run ./bench -upgrade

.PHONY: bench-release
bench-release: ## measure the files of a release in dist/; writes their sizes to bench/results.json
	go run ./bench -release dist

.PHONY: bench-buckets
bench-buckets: deps ## measure the gateway of buckets beside the filesystem below it; writes bench/results.json; as root
	test/programs/build.sh versitygw
	go run ./bench -buckets

.PHONY: scale
scale: ## measure one controller with up to 10,000 instances for ten minutes; writes docs/explanation/scale.svg and results
	go run ./bench -scale

.PHONY: clean
clean: ## remove all build results
	rm -rf bin dist
