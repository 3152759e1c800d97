// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package verify

import (
	"context"
	"encoding/json"
	"fmt"
	"net/url"
	"regexp"
	"slices"
	"strings"
)

// testCase is a case. Its ID is that of docs/reference/rack.md §11, or the section of that page with a letter.
type testCase struct {
	id, what string
	// given are conditions, separated by ", ": see [run.establish].
	given string
	need  need
	asks  []ask
	// rests says what of the plugin rests on the case, harm how bad a difference would be.
	rests string
	harm  harm
	// reads is the part of the message that the plugin reads. If only another part differs, nothing rests on it.
	reads string
	// noisy means that others who use the silo can disturb the case, so that it is repeated.
	noisy bool
}

// ask is a request of a case and what is expected of its answer.
type ask struct {
	request, body string // with placeholders: see [run.fill]
	anonymous     bool
	version       string
	want          want
	// has are conditions of the answer, as "path=value" or "path!=value".
	has []string
	or  []alternative
	// until repeats the request until its answer is the expected one.
	until bool
	// note notes the storage of the utilization. fact is what an answer as expected says about the rack.
	note bool
	fact fact
	// check is a further check. It returns what was expected instead, or "".
	check func(context.Context, *run, answer) (string, error)
}

// alternative is another answer that a rack may give. With skip the case ends, untried for that reason.
type alternative struct {
	want want
	skip string
	fact fact
}

// need is what a case needs of the run or of the silo.
type need int

const (
	viewer        need = 1 << iota // a token that may only look
	fleetViewer                    // a token of a viewer of the fleet
	noFleetViewer                  // any other token
	starts                         // starting an instance
	fullCPUs                       // no processor of the quota is free
	smallQuota                     // the free quota, and 1 GiB more, are within the budget
	guest                          // the instance of [Options.Instance]
)

// harm is what follows if a case differs.
type harm int

const (
	none    harm = iota // nothing in the plugin: only the simulated rack must follow the rack
	service             // a call fails, or answers with another code; no data are at risk
	data                // a volume could be lost, or be where it should not be
)

func (h harm) advice() string {
	return map[harm]string{
		none:    "You can go on.",
		service: "You can go on, but this may not work. Please report it.",
		data:    "Do not use the plugin on this rack. Report it first.",
	}[h]
}

// keys are the fixtures that a case works with.
func (c testCase) keys() (keys []string) {
	for condition := range strings.SplitSeq(c.given, ", ") {
		keys = append(keys, strings.Fields(condition)...)
	}
	for _, a := range c.asks {
		for _, p := range placeholder.FindAllString(a.request+a.body, -1) {
			keys = append(keys, p[1:len(p)-1])
		}
	}
	return keys
}

// asks makes the ask of a line with the method, the path and the body.
func asks(line string, w want, has ...string) ask {
	a := ask{request: line, want: w, has: has}
	if method, rest, _ := strings.Cut(line, " "); strings.Contains(rest, " ") {
		path, body, _ := strings.Cut(rest, " ")
		a.request, a.body = method+" "+path, body
	}
	return a
}

func (a ask) untilSo() ask                         { a.until = true; return a }
func (a ask) byNobody() ask                        { a.anonymous = true; return a }
func (a ask) learns(f fact) ask                    { a.fact = f; return a }
func (a ask) orElse(o ...alternative) ask          { a.or = o; return a }
func (a ask) inVersion(version string) ask         { a.version = version; return a }
func one(line string, w want, has ...string) []ask { return []ask{asks(line, w, has...)} }

var (
	ok        = want{status: 200}
	created   = want{status: 201}
	accepted  = want{status: 202}
	noContent = want{status: 204}

	forbidden    = want{403, "Forbidden", "Forbidden"}
	notStopped   = want{400, "InvalidRequest", "cannot attach disk: instance is not fully stopped"}
	cannotDetach = want{400, "InvalidRequest", "cannot detach disk: instance is not fully stopped"}
	attachedElse = want{400, "InvalidRequest", `cannot attach disk "[d]": disk is attached to another instance`}
	tooFast      = "the instance had stopped already"
	storageQuota = want{
		507,
		"InsufficientCapacity",
		"Insufficient capacity: Storage Limit Exceeded: Not enough storage to complete request. Either remove unneeded disks and snapshots to free up resources or contact the rack operator to request a capacity increase.",
	}
	missingID     = "00000000-1111-4222-8333-444444444444"
	tooLargeBytes = fmt.Sprint(int64(1) << 62) // no rack can hold it, so a rack that accepts it makes nothing
)

func notFound(what string) want { return want{404, "ObjectNotFound", "not found: " + what} }
func invalid(why string) want   { return want{400, "InvalidRequest", why} }
func badSize(why string) want {
	return want{400, "InvalidValue", `unsupported value for "size": total size must be ` + why}
}

// The bodies of requests. Changes are pairs of a field and its JSON.

func diskBody(key, backend string, changes ...string) string {
	fields := map[string]json.RawMessage{
		"name": quote("[" + key + "]"), "description": quote(marker), "size": json.RawMessage(fmt.Sprint(gib)),
		"disk_backend": json.RawMessage(backend),
	}
	for pair := range slices.Chunk(changes, 2) {
		fields[pair[0]] = json.RawMessage(pair[1])
	}
	body, err := json.Marshal(fields)
	if err != nil {
		// A placeholder for a number is no JSON.
		return strings.Replace(diskBody(key, backend), fmt.Sprintf(`"size":%d`, gib), `"size":`+changes[1], 1)
	}
	return unescape(body)
}

// unescape undoes what encoding/json does to the placeholders.
func unescape(body []byte) string {
	return strings.NewReplacer(`\u003c`, "<", `\u003e`, ">").Replace(string(body))
}

func quote(s string) json.RawMessage {
	body, err := json.Marshal(s)
	if err != nil {
		panic(err) // a string
	}
	return body
}

func blankBody(key string, changes ...string) string {
	return diskBody(key, `{"type":"distributed","disk_source":{"type":"blank","block_size":512}}`, changes...)
}

func restoreBody(key, snapshot string, readOnly bool, changes ...string) string {
	return diskBody(key, fmt.Sprintf(
		`{"type":"distributed","disk_source":{"type":"snapshot","snapshot_id":"<%s>","read_only":%t}}`,
		snapshot,
		readOnly,
	), changes...)
}

func snapshotBody(key, disk string) string {
	return fmt.Sprintf(`{"name":"[%s]","description":%q,"disk":"[%s]"}`, key, marker, disk)
}

func groupBody(key string) string {
	return fmt.Sprintf(`{"name":"[%s]","description":%q,"policy":"allow","failure_domain":"sled"}`, key, marker)
}

// instanceBody is an instance without a network, which the cases do not need. The rack does not restart it by itself.
func instanceBody(key, more string) string {
	return fmt.Sprintf(`{"name":"[%s]","description":%q,"hostname":"[%s]","ncpus":1,"memory":%d,"start":false,`+
		`"disks":[],"network_interfaces":{"type":"none"},"auto_restart_policy":"never",%s}`, key, marker, key, gib, more)
}

const (
	attachD = `POST /instances/<i>/disks/attach {"disk":"[d]"}`
	detachD = `POST /instances/<i>/disks/detach {"disk":"[d]"}`
	makes   = "POST /disks?{p} "
	snaps   = "POST /snapshots?{p} "
)

// cases are all cases, in the order in which they are played: those that start instances come last.
var cases = []testCase{
	{id: "T1", what: "a list without a token", asks: []ask{
		asks("GET /disks?{p}", want{401, "Unauthorized", "credentials missing or invalid"}).byNobody()},
		rests: "The plugin takes a 401, and nothing else, for a wrong or expired token.", harm: service},
	{id: "T2", what: "an unknown path",
		asks: one("GET /nonexistent", want{404, "", "Not Found"}),
		rests: "A 404 without a code never counts as a missing disk. Otherwise a proxy's 404 could make a " +
			"volume count as deleted.", harm: data},
	{id: "T3", what: "a method that a path does not have",
		asks: one("PUT /projects", want{405, "", "Method Not Allowed"})},
	{id: "T4", what: "a ping without a token", asks: []ask{asks("GET /ping", ok, "status=ok").byNobody()},
		rests: "The plugin finds out the API version by pings without a token.", harm: service},
	{id: "T5", what: "a viewer makes a disk", need: viewer, asks: one(makes+blankBody("d"), forbidden),
		rests: "The plugin tells a role that is too low from a missing project.", harm: service},
	{id: "T6", what: "a body that ends too early",
		asks: one("POST /instances?{p} {", want{400, "", "unable to parse JSON body: EOF while parsing an object…"})},
	{id: "T7", what: "such a body without a token",
		asks: []ask{asks("POST /disks?{p} {", want{400, "", "unable to parse JSON body:…"}).byNobody()}},
	{id: "§1a", what: "an API version that the rack does not know", reads: "server does not support this API version",
		asks: []ask{
			asks("GET /ping", want{400, "", "server does not support this API version…"}).byNobody().inVersion(future)},
		rests: "The plugin finds out by this refusal which version the rack serves.", harm: service},
	{id: "§1b", what: "a version that is none", asks: []ask{
		asks("GET /ping", want{400, "", `bad value for header "api-version"…`}).byNobody().inVersion("junk")}},

	{id: "S1", what: "an ID together with a project", given: "d",
		asks:  one("GET /disks/<d>?{p}", invalid("when providing disk as an ID project should not be specified")),
		rests: "The plugin never sends both. A rack that accepts them would only be more lenient."},
	{id: "S2", what: "a list without a project",
		asks: one("GET /disks", want{400, "", "unable to parse query string: missing field `project`"})},
	{id: "S3", what: "what is neither a name nor an ID",
		asks: one(
			"GET /instances/my_instance?{p}",
			want{400, "", "bad parameter in URL path: data did not match any variant of untagged enum NameOrId"},
		)},
	{id: "S4", what: "a project that does not exist", reads: "not found: project ",
		asks: one("GET /instances?project=nonexistent", notFound(`project with name "nonexistent"`)),
		rests: "The plugin tells a missing project from a missing disk by this message. Otherwise a lost role " +
			"could make a volume count as deleted.", harm: data},
	{id: "S5", what: "pages of a list", given: "a, b, c",
		asks:  []ask{{request: "GET /disks?{p}&limit=2", want: ok, check: followsPages}},
		rests: "The plugin reads lists page by page. A list that ends too early would hide volumes.", harm: data},
	{id: "S6", what: "a list from its end", given: "a, b, c",
		asks: []ask{{request: "GET /disks?{p}&sort_by=name_descending", want: ok, check: descends}}},
	{id: "S7", what: "a name without a project",
		asks: one("GET /instances/[i]", invalid("instance should either be UUID or project should be specified"))},

	{id: "D1", what: "make a disk", given: "no e", asks: []ask{
		asks(makes+blankBody("e"), created, "state.state=creating", "snapshot_id=null", "image_id=null", "name=[e]"),
		asks("GET /disks/<e>", ok, "state.state=detached", fmt.Sprintf("size=%d", gib), "block_size=512").untilSo()},
		rests: "Each volume is made like this. The plugin waits until the disk is detached.", harm: service},
	{id: "D2", what: "make a disk whose name is taken", given: "d",
		asks: []ask{
			asks(makes+blankBody("d"), want{400, "ObjectAlreadyExists", `already exists: disk "[d]"`}),
			asks("GET /disks/[d]?{p}", ok, "id=<d>")},
		rests: "A repeated CreateVolume finds its disk by this refusal. Otherwise it would make a second disk, " +
			"or none.", harm: data},
	{id: "D3", what: "a disk below 1 GiB", given: "no e", reads: "unsupported value for \"size",
		asks:  one(makes+blankBody("e", "size", "536870912"), badSize("at least 1 GiB")),
		rests: "CreateVolume answers OUT_OF_RANGE.", harm: service},
	{id: "D4", what: "a size that is not in whole GiB", given: "no e", reads: "unsupported value for \"size",
		asks:  one(makes+blankBody("e", "size", "1073742336"), badSize("a multiple of 1 GiB")),
		rests: "CreateVolume answers OUT_OF_RANGE.", harm: service},
	{id: "D5", what: "a disk of 4 EiB", given: "no e", reads: "unsupported value for \"size",
		asks:  one(makes+blankBody("e", "size", tooLargeBytes), badSize("less than 1023 GiB")),
		rests: "CreateVolume answers OUT_OF_RANGE.", harm: service},
	{id: "D6", what: "blocks of 1024 bytes", given: "no e",
		asks: one(
			makes+diskBody("e", `{"type":"distributed","disk_source":{"type":"blank","block_size":1024}}`),
			want{400, "", "unable to parse JSON body:…"},
		)},
	{id: "D7", what: "a name of 64 characters",
		asks: one(
			makes+blankBody("d", "name", `"`+namePrefix+strings.Repeat("a", 64-len(namePrefix))+`"`),
			want{400, "", "…name may contain at most 63 characters"},
		),
		rests: "The names of the plugin have at most 63 characters."},
	{id: "D8", what: "a UUID without hyphens as a name",
		asks: one(
			makes+blankBody("d", "name", `"`+uuidName+`"`),
			want{400, "", "…name cannot be a UUID to avoid ambiguity with IDs"},
		),
		rests: "A selector that parses as a UUID is an ID, so that a name never addresses another disk.", harm: data},
	{id: "D9", what: "a name is free after a deletion", given: "d", asks: []ask{
		asks("DELETE /disks/<d>", noContent),
		asks(makes+blankBody("d"), created, "name=[d]", "id!=<d>")},
		rests: "The ID identifies a disk, not the name. The plugin keeps the ID.", harm: data},
	{id: "§2a", what: "the size comes before the name", given: "d", reads: "unsupported value for \"size",
		asks:  one(makes+blankBody("d", "size", "536870912"), badSize("at least 1 GiB")),
		rests: "CreateVolume answers OUT_OF_RANGE also for a name that is taken.", harm: service},
	{id: "§2b", what: "the block size comes before 1 GiB", given: "no e",
		asks: one(
			makes+blankBody("e", "size", "536870913"),
			want{
				400,
				"InvalidValue",
				`unsupported value for "size and block_size": total size must be a multiple of block size 512`,
			},
		)},
	{id: "§2c", what: "1 GiB comes before whole GiB, and whole GiB before the largest size", given: "no e", asks: []ask{
		asks(makes+blankBody("e", "size", "536871424"), badSize("at least 1 GiB")),
		asks(makes+blankBody("e", "size", "4611686018427388416"), badSize("a multiple of 1 GiB"))}},
	{id: "§2d", what: "the snapshot comes before the size", given: "no e",
		asks: one(
			makes+strings.Replace(restoreBody("e", "x", false, "size", "1"), "<x>", missingID, 1),
			notFound(`snapshot with id "`+missingID+`"`),
		),
		rests: "CreateVolume answers NOT_FOUND for a missing snapshot.", harm: service},
	{id: "§2e", what: "the project comes before the snapshot",
		asks: one(
			"POST /disks?project=nonexistent "+strings.Replace(restoreBody("e", "x", false), "<x>", missingID, 1),
			notFound(`project with name "nonexistent"`),
		),
		rests: "A lost role is not taken for a missing snapshot.", harm: service},

	{id: "X1", what: "delete a disk", given: "d", reads: "not found: ",
		asks: []ask{
			asks("DELETE /disks/<d>", noContent),
			asks(
				"GET /disks/[d]?{p}",
				notFound(`disk with name "[d]"`),
			),
			asks("GET /disks/<d>", notFound(`disk with id "<d>"`)),
		},
		rests: "DeleteVolume answers OK only after this. The plugin reads the 404 of a disk that is gone.", harm: data},
	{id: "X2", what: "delete a disk twice", given: "d", reads: "not found: ", asks: []ask{
		asks("DELETE /disks/<d>", noContent), asks("DELETE /disks/<d>", notFound(`disk with id "<d>"`))},
		rests: "A repeated DeleteVolume succeeds.", harm: service},
	{id: "X3", what: "delete a disk that is attached", given: "d on i",
		asks: []ask{
			asks("DELETE /disks/<d>", invalid(`disk cannot be deleted in state "attached"`)),
			asks("GET /disks/<d>", ok, "state.state=attached", "state.instance=<i>")},
		rests: "A volume that a node still has must not be deleted. The plugin relies on the rack for the last " +
			"moment.", harm: data},

	{id: "N1", what: "a snapshot of a detached disk", given: "d, no s", asks: []ask{
		asks(
			snaps+snapshotBody("s", "d"),
			created,
			"state=ready",
			fmt.Sprintf("size=%d", gib),
			"disk_id=<d>",
			"block_size=absent",
		),
		asks("GET /disks/<d>", ok, "state.state=detached").untilSo(),
	},
		rests: "CreateSnapshot answers that the snapshot is ready to use.", harm: data},
	{id: "N3", what: "a snapshot of a read-only disk", given: "d, s, read, no s2",
		asks: one(snaps+snapshotBody("s2", "read"), invalid("can't create a snapshot of a read-only disk"))},
	{id: "N4", what: "a snapshot whose name is taken", given: "d, s",
		asks:  one(snaps+snapshotBody("s", "d"), want{400, "ObjectAlreadyExists", `already exists: snapshot "[s]"`}),
		rests: "A repeated CreateSnapshot finds its snapshot by this refusal.", harm: data},
	{id: "N5", what: "a disk that is smaller than its snapshot", given: "big, sbig, no e",
		asks: one(
			makes+restoreBody("e", "sbig", false),
			invalid("disk size 1073741824 must be greater than or equal to snapshot size 2147483648"),
		),
		rests: "A restored volume must have all data of its snapshot.", harm: data},
	{id: "N7", what: "delete a snapshot that a disk was made from", given: "d, s, no child, child", asks: []ask{
		asks("DELETE /snapshots/<s>", noContent), asks("GET /snapshots/[s]?{p}", notFound(`snapshot with name "[s]"`)),
		asks("GET /disks/<child>", ok, "state.state=detached", "snapshot_id=<s>")},
		rests: "A restored volume does not depend on its snapshot. A clone deletes its temporary snapshot.", harm: data},
	{id: "N8", what: "a read-only disk from a snapshot", given: "d, s, no read",
		asks: one(
			makes+restoreBody("read", "s", true),
			created,
			"state.state=detached",
			"read_only=true",
			"snapshot_id=<s>",
			"block_size=512",
		),
		rests: "Read-only volumes of snapshots.", harm: service},
	{id: "X4", what: "a snapshot stays when its disk goes", given: "d, s", asks: []ask{
		asks("DELETE /disks/<d>", noContent), asks("GET /snapshots/<s>", ok, "state=ready", "disk_id=<d>")},
		rests: "A snapshot outlives its volume, as backups need it.", harm: data},
	{id: "§6a", what: "a snapshot of a local disk", given: "local, no s2",
		asks: one(snaps+snapshotBody("s2", "local"), invalid("can't create a snapshot of a local storage disk"))},
	{id: "Q3", what: "the utilization counts disks and snapshots with their full size",
		given: "no sbig, no big", noisy: true,
		asks: []ask{
			{request: "GET /utilization", want: ok, note: true},
			asks(makes+blankBody("big", "size", fmt.Sprint(2*gib)), created),
			asks("GET /utilization", ok, "provisioned.storage={used+2}"),
			asks(snaps+snapshotBody("sbig", "big"), created),
			asks("GET /utilization", ok, "provisioned.storage={used+4}"),
			asks("DELETE /disks/<big>", noContent),
			asks("GET /utilization", ok, "provisioned.storage={used+2}")},
		rests: "GetCapacity says what the quota still allows.", harm: service},

	{id: "A1", what: "attach a disk", given: "d, i",
		asks:  one(attachD, accepted, "state.state=attached", "state.instance=<i>", "id=<d>"),
		rests: "ControllerPublishVolume answers OK when the rack says attached.", harm: data},
	{id: "A2", what: "attach a disk again", given: "d on i",
		asks:  one(attachD, accepted, "state.state=attached", "state.instance=<i>"),
		rests: "A repeated attach changes nothing. The plugin repeats an attach whose answer was lost.", harm: data},
	{id: "A3", what: "attach a disk that another instance has", given: "d on i2, i", asks: []ask{
		asks(attachD, attachedElse), asks("GET /disks/<d>", ok, "state.instance=<i2>")},
		rests: "A disk is on one instance at most. Otherwise two nodes could write to one volume.", harm: data},
	{id: "A7", what: "attach a disk that does not exist", given: "i",
		asks:  one(`POST /instances/<i>/disks/attach {"disk":"nope"}`, notFound(`disk with name "nope"`)),
		rests: "ControllerPublishVolume answers NOT_FOUND.", harm: service, reads: "not found: "},
	{id: "§4a", what: "the instance comes before the disk", reads: "not found: ",
		asks: one(
			"POST /instances/"+missingID+`/disks/attach {"disk":"nope"}`,
			notFound(`instance with id "`+missingID+`"`),
		),
		rests: "The plugin tells a missing node from a missing volume.", harm: service},
	{id: "B1", what: "detach a disk", given: "d on i",
		asks:  one(detachD, accepted, "state.state=detached", "state.instance=absent"),
		rests: "ControllerUnpublishVolume answers OK when the rack says detached.", harm: data},
	{id: "B2", what: "detach a disk again", given: "d, i", asks: one(detachD, accepted, "state.state=detached"),
		rests: "A repeated detach succeeds.", harm: service},
	{id: "§4b", what: "detach a disk that another instance has", given: "d on i2, i", asks: []ask{
		asks(detachD, invalid(`cannot detach disk "[d]": disk is attached to another instance`)),
		asks("GET /disks/<d>", ok, "state.instance=<i2>")},
		rests: "A late detach never takes a volume from the node that has it now.", harm: data},
	{id: "B4", what: "detach the boot disk", given: "booted",
		asks: one(
			`POST /instances/<booted>/disks/detach {"disk":"[boot]"}`,
			want{409, "Conflict", "boot disk cannot be detached"},
		)},
	{id: "I6", what: "delete an instance with disks", given: "booted, d on booted", asks: []ask{
		asks("DELETE /instances/<booted>", noContent), asks("GET /disks/<d>", ok, "state.state=detached"),
		asks("GET /disks/[boot]?{p}", ok, "state.state=detached")},
		rests: "The volumes of a node that was deleted are not lost, and can be attached elsewhere.", harm: data},
	{id: "I2", what: "stop an instance that is stopped", given: "i",
		asks:  one("POST /instances/<i>/stop", accepted, "run_state=stopped"),
		rests: "A planned restart may repeat a stop.", harm: service},
	{id: "I4", what: "reboot an instance that is stopped", given: "i",
		asks: one("POST /instances/<i>/reboot", invalid("cannot reboot an instance in state stopped with no VMM"))},
	{id: "I7", what: "start an instance that was deleted", given: "i", asks: []ask{
		asks("DELETE /instances/<i>", noContent), asks("POST /instances/<i>/start", notFound(`instance with id "<i>"`))}},
	{id: "§5a", what: "make an instance whose name is taken", given: "i",
		asks: one(
			"POST /instances?{p} "+instanceBody("i", `"boot_disk":null`),
			want{400, "ObjectAlreadyExists", `already exists: instance "[i]"`},
		)},
	{id: "Y3", what: "the addresses of an instance without a network", given: "i",
		asks: one("GET /instances/<i>/external-ips", ok, "items.#=0", "next_page=null")},
	{id: "Y4", what: "interfaces without an instance",
		asks: one("GET /network-interfaces", want{400, "", "unable to parse query string: missing field `instance`"})},

	{id: "A5", what: "attach a 13th disk", given: "full packed, d", reads: "cannot attach more than ",
		asks: []ask{
			asks(
				`POST /instances/<packed>/disks/attach {"disk":"[d]"}`,
				invalid("cannot attach more than 12 disks to instance"),
			).learns(twelveDisks),
		},
		rests: "--max-disks, the limit of volumes on a node. With a lower limit on the rack some volumes would " +
			"wait for ever.", harm: service},
	{id: "§4c", what: "attach a disk again to a full instance", given: "full packed",
		asks:  one(`POST /instances/<packed>/disks/attach {"disk":"[fill-0]"}`, accepted, "state.state=attached"),
		rests: "A repeated attach succeeds on a full node, too.", harm: service},

	{id: "G1", what: "make a group", given: "no g", asks: []ask{
		asks(
			"POST /anti-affinity-groups?{p} "+groupBody("g"),
			created,
			"name=[g]",
			"policy=allow",
			"failure_domain=sled",
			"description="+marker,
		),
		asks("GET /anti-affinity-groups/<g>", ok, "name=[g]"),
	},
		rests: "The plugin keeps its records of restarts and expansions in empty groups.", harm: data},
	{id: "G2", what: "make a group whose name is taken", given: "g",
		asks: []ask{
			asks(
				"POST /anti-affinity-groups?{p} "+groupBody("g"),
				want{400, "ObjectAlreadyExists", `already exists: anti-affinity-group "[g]"`},
			),
			asks("GET /anti-affinity-groups/[g]?{p}", ok, "id=<g>"),
		},
		rests: "Of two controllers exactly one makes a record. Otherwise both could act on a volume at the same " +
			"time.", harm: data},
	{id: "G3", what: "a viewer makes a group", need: viewer,
		asks: one("POST /anti-affinity-groups?{p} "+groupBody("g"), forbidden)},
	{id: "G4", what: "change a group's description", given: "g", asks: []ask{
		asks(
			fmt.Sprintf(`PUT /anti-affinity-groups/[g]?{p} {"name":"[g]","description":"%s: changed"}`, marker),
			ok,
			"name=[g]",
			"description="+marker+": changed",
		),
		asks("GET /anti-affinity-groups/<g>", ok, "description="+marker+": changed"),
	},
		rests: "The plugin changes its records in place.", harm: data},
	{id: "G5", what: "a group's name is free after its deletion", given: "g", asks: []ask{
		asks("DELETE /anti-affinity-groups/<g>", noContent),
		asks("POST /anti-affinity-groups?{p} "+groupBody("g"), created, "name=[g]")},
		rests: "A record that was deleted can be made again.", harm: data},
	{id: "G6", what: "a group that does not exist", given: "no g", reads: "not found: ",
		asks:  one("GET /anti-affinity-groups/[g]?{p}", notFound(`anti-affinity-group with name "[g]"`)),
		rests: "The plugin takes this 404 for a record that does not exist.", harm: data},

	{id: "Q1", what: "a disk beyond the quota", given: "no e", need: smallQuota, noisy: true,
		asks:  one(makes+blankBody("e", "size", "{free+1}"), storageQuota),
		rests: "CreateVolume answers RESOURCE_EXHAUSTED.", harm: service},
	{id: "Q2", what: "a disk that fills the quota exactly", given: "no e", need: smallQuota, noisy: true,
		asks:  one(makes+blankBody("e", "size", "{free}"), created),
		rests: "GetCapacity promises the whole rest of the quota.", harm: service},
	{id: "§2f", what: "the quota comes before the name", given: "d", need: smallQuota, noisy: true,
		asks:  one(makes+blankBody("d", "size", "{free+1}"), storageQuota),
		rests: "With a full quota a repeated CreateVolume looks for its disk.", harm: service},

	{id: "U1", what: "the tokens of the user",
		asks:  []ask{{request: "GET /me/access-tokens", want: ok, check: showsNoToken}},
		rests: "The plugin warns before the token expires.", harm: service},
	{id: "U2", what: "groups and roles", asks: []ask{
		asks("GET /me/groups", ok, "items!=absent"), asks("GET /policy", ok, "role_assignments!=absent"),
		asks("GET /projects/{P}/policy", ok, "role_assignments!=absent")},
		rests: "doctor says which role the token has.", harm: service},
	{id: "R1", what: "the racks, without a role on the fleet", need: noFleetViewer,
		asks: one("GET /system/hardware/racks", forbidden)},
	{id: "R2", what: "the racks, for a viewer of the fleet", need: fleetViewer,
		asks: one("GET /system/hardware/racks", ok, "items.#=1", "items.0.id!=absent")},

	{id: "Q4", what: "start an instance without a free processor", given: "i", need: starts | fullCPUs,
		asks: []ask{
			asks("POST /instances/<i>/start", want{507, "InsufficientCapacity", "Insufficient capacity: vCPU Limit Exceeded…"}),
			asks("GET /instances/<i>", ok, "run_state=stopped").untilSo()},
		rests: "After a start that the rack refused the instance is stopped again, and a planned restart tries " +
			"it later.", harm: service},
	{id: "I8", what: "start an instance with a disk", given: "d on i, i", need: starts,
		asks: []ask{
			asks("POST /instances/<i>/start", accepted, "run_state=starting"),
			asks("GET /instances/<i>", ok, "run_state=running").untilSo(),
			asks("GET /disks/<d>", ok, "state.state=attached", "state.instance=<i>")},
		rests: "A planned restart attaches disks while the instance is stopped, and they are there after the " +
			"start.", harm: data},
	{id: "§5b", what: "start an instance that runs", given: "i runs", need: starts,
		asks:  one("POST /instances/<i>/start", accepted, "run_state=running"),
		rests: "A planned restart may repeat a start.", harm: service},
	{id: "I5", what: "delete an instance that runs", given: "i runs", need: starts,
		asks: one(
			"DELETE /instances/<i>",
			invalid("cannot delete instance: instance is running or has not yet fully stopped"),
		)},
	{id: "N2", what: "a snapshot of a disk in use", given: "d on i, no s, i runs", need: starts, asks: []ask{
		asks(
			snaps+snapshotBody("s", "d"),
			created,
			"state=ready",
			"disk_id=<d>",
		),
		asks("GET /disks/<d>", ok, "state.state=attached"),
	},
		rests: "A snapshot of a volume in use leaves it attached.", harm: data},
	{id: "§4d", what: "attach a disk again while the instance runs", given: "d on i, i runs", need: starts,
		asks:  one(attachD, accepted, "state.state=attached", "state.instance=<i>"),
		rests: "A repeated ControllerPublishVolume succeeds while the node runs.", harm: service},
	{id: "§4e", what: "another instance comes before a running one", given: "d on i2, i runs", need: starts,
		asks:  one(attachD, attachedElse),
		rests: "The plugin says that another node has the volume, and does not wait for a restart.", harm: service},
	{id: "A4", what: "attach a disk while the instance runs",
		given: "d, i runs", need: starts, reads: "instance is not fully stopped",
		asks: []ask{asks(attachD, notStopped).learns(noHotplug).orElse(alternative{want: accepted, fact: hotplug})},
		rests: "In attach mode restart the plugin recognises by this refusal that a restart is " +
			"needed.", harm: service},
	{id: "B3", what: "detach a disk while the instance runs",
		given: "d on i, i runs", need: starts, reads: "instance is not fully stopped",
		asks:  []ask{asks(detachD, cannotDetach).learns(noUnplug).orElse(alternative{want: accepted, fact: unplug})},
		rests: "A disk stays with a running node. The plugin recognises that a restart is needed.", harm: data},
	{id: "I1", what: "stop an instance", given: "d, i runs", need: starts, asks: []ask{
		asks("POST /instances/<i>/stop", accepted, "run_state=stopping"),
		asks("GET /instances/<i>", ok, "run_state=stopped").untilSo(),
		asks(attachD, accepted, "state.state=attached")},
		rests: "An instance that shows stopped really takes disks. A planned restart attaches at that moment.", harm: data},
	{id: "A9", what: "attach a disk while the instance stops",
		given: "d, i runs", need: starts, reads: "instance is not fully stopped",
		asks: []ask{
			asks("POST /instances/<i>/stop", accepted),
			asks(attachD, notStopped).orElse(alternative{want: accepted, skip: tooFast})},
		rests: "The plugin waits until the instance is stopped.", harm: service},
	{id: "I3", what: "start an instance while it stops", given: "i runs", need: starts, asks: []ask{
		asks("POST /instances/<i>/stop", accepted),
		asks("POST /instances/<i>/start", want{409, "Conflict", "instance must finish stopping before it can be started"}).
			orElse(alternative{want: accepted, skip: tooFast})},
		rests: "A planned restart repeats such a start.", harm: service},

	{id: "Y1", what: "the interfaces of the instance", need: guest,
		asks: one("GET /network-interfaces?instance=<instance>", ok, "items.0.mac!=absent")},
	{id: "Y2", what: "pages of interfaces", need: guest, asks: []ask{
		asks("GET /network-interfaces?instance=<instance>&limit=1", ok, "items.#=1", "next_page!=null"),
		asks("GET /network-interfaces?limit=1000&page_token={next}", ok)}},
	{id: "§9a", what: "attached while stopped: serial and size in the guest",
		given: "instance, d on instance, big on instance, instance runs", need: guest,
		asks: []ask{
			{request: inGuest, until: true, has: []string{
				"dmi.sys_vendor=Oxide", "dmi.product_uuid=<instance>", "dmi.product_serial=<instance>",
				"disks.serial:[d].size=1073741824", "disks.serial:[d].block_size=512", "disks.serial:[big].size=2147483648"}}},
		rests: "The serial is the only link between a disk of the rack and a device in the guest. A volume " +
			"could be formatted in the place of another.", harm: data},
	{id: "§9b", what: "attach a disk while the guest runs",
		given: "no c, c, instance runs", need: guest, reads: "instance is not fully stopped",
		asks: []ask{asks(`POST /instances/<instance>/disks/attach {"disk":"[c]"}`, notStopped).learns(noHotplug).
			orElse(alternative{want: accepted, fact: hotplug})},
		rests: "In attach mode restart the plugin recognises by this refusal that a restart is " +
			"needed.", harm: service},
	{id: "§9c", what: "a hot-plugged disk in the guest", given: "no c, c, instance runs", need: guest, asks: []ask{
		asks(
			`POST /instances/<instance>/disks/attach {"disk":"[c]"}`,
			accepted,
		).orElse(alternative{want: notStopped, skip: "the rack has no hot-plug"}),
		asks("GET /disks/<c>", ok, "state.state=attached", "state.instance=<instance>").untilSo(),
		{request: inGuest, until: true, has: []string{"disks.serial:[c].size=1073741824"}},
	},
		rests: "In attach mode hot a volume reaches its node without a restart.", harm: service},
	{id: "§9d", what: "detach a disk while the guest runs",
		given: "d on instance, instance runs", need: guest, reads: "instance is not fully stopped",
		asks: []ask{asks(`POST /instances/<instance>/disks/detach {"disk":"[d]"}`, cannotDetach).learns(noUnplug).
			orElse(alternative{want: accepted, fact: unplug})},
		rests: "A disk stays with a running node. Otherwise a volume in use could be torn away.", harm: data},
	{id: "§9e", what: "detached while stopped: the guest has it no more",
		given: "d, big on instance, instance runs", need: guest,
		asks: []ask{
			{request: inGuest, until: true, has: []string{"disks.serial:[d]=absent", "disks.serial:[big].size=2147483648"}}},
		rests: "A volume that was detached is gone from its node.", harm: data},
}

// beyond are the cases that cannot be played from outside, with the reason.
var beyond = []struct{ ids, why string }{
	{"A6, N6, N9", "they need an object in another project, and nothing outside of the project is touched"},
	{"A8, B5", "no request makes an instance fail"},
	{"B6", "the API shows no slots; the report of a guest shows the PCI addresses"},
	{"D10", "it needs a rack that is full"},
	{"Y5", "it needs a second token, without a role in the project"},
	{"§1: no API version in a request; a body beyond 1 MiB", "the plugin never sends them"},
	{"§2: maintenance, faulted and the states of an import", "they pass too fast to be seen, or no request leads to them"},
	{"§4: a local disk while the rack chooses a sled", "the moment passes too fast"},
	{"§5: creating, rebooting, migrating; sleds in trouble", "only the rack or its operator brings them about"},
	{"§6: the repair of a volume; a rack without space", "no request leads to them"},
	{"§7: the quota of memory", "it needs a silo whose memory is in use"},
	{"§10: answers that are lost", "a client cannot make a rack lose them"},
	{"U1: a token that expires", "the run makes no tokens"},
}

// followsPages reads a list page by page, and compares it with the list in one page.
func followsPages(ctx context.Context, r *run, first answer) (string, error) {
	all, err := r.list(ctx, "/disks?project="+r.projectID)
	if err != nil {
		return "", err
	}
	seen, a := 0, first
	for {
		items, _ := get(a.body, "items").([]any)
		next := text(get(a.body, "next_page"))
		switch {
		case (next == "") != (len(items) == 0):
			return "next_page is null on an empty page, and only there", nil
		case len(items) != min(2, len(all)-seen):
			return fmt.Sprintf("%d items on this page, because the list has %d", min(2, len(all)-seen), len(all)), nil
		case next == "":
			return "", nil
		}
		seen += len(items)
		if a, err = r.send(
			ctx,
			request{method: "GET", path: "/disks?limit=2&page_token=" + url.QueryEscape(next)},
		); err != nil {
			return "", err
		}
	}
}

// descends checks the order of a list.
func descends(_ context.Context, _ *run, a answer) (string, error) {
	var names []string
	items, _ := get(a.body, "items").([]any)
	for _, item := range items {
		names = append(names, text(get(item, "name")))
	}
	if !slices.IsSortedFunc(names, func(x, y string) int { return strings.Compare(y, x) }) {
		return "names in descending order", nil
	}
	return "", nil
}

var anyToken = regexp.MustCompile(`(?i)oxide-token-`)

// showsNoToken checks that a list of tokens does not have the tokens themselves.
func showsNoToken(_ context.Context, _ *run, a answer) (string, error) {
	if anyToken.Match(a.raw) || show(get(a.body, "items.0.id")) == "absent" {
		return "tokens with their IDs, without the tokens themselves", nil
	}
	return "", nil
}
