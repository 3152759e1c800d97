// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package verify

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"
)

// Options say which rack to verify, and what the run may do there.
type Options struct {
	// Host is the URL of the rack's API, Token a token of a user of its silo.
	Host, Token string
	// HTTPClient sends the requests. It must follow no redirect: that would show the token to another server.
	HTTPClient *http.Client
	// Version is the version of this program.
	Version string
	// Project is the name or ID of the project. EmptyProject must be its name: who repeats it knows which project the
	// run works in.
	Project, EmptyProject string
	// Budget is how many bytes of disks and snapshots the run may have at the same time.
	Budget int64
	// StartInstances allows the run to start instances of its own, one at a time, with one processor and 1 GiB.
	StartInstances bool
	// Instance names an instance that may be stopped and started. GuestCommand runs oxide-csi verify-guest in its guest.
	Instance, GuestCommand string
	// Only are the IDs of the cases to play; empty means all.
	Only []string
	// Wait is how long a state may take. Pause is the time between two looks at it.
	Wait, Pause time.Duration
	// Progress receives a line for each case, Record the recording. Both may be nil.
	Progress, Record io.Writer
}

// CheckIDs checks that there is a case for each ID.
func CheckIDs(ids []string) error {
	for _, id := range ids {
		if !slices.ContainsFunc(cases, func(c testCase) bool { return c.id == id }) {
			return fmt.Errorf("there is no case %q: the report lists all cases", id)
		}
	}
	return nil
}

// run is a run of the cases.
type run struct {
	o      Options
	client *client
	report *Report
	record *recorder

	projectID string
	// instance is the instance of [Options.Instance]. before is the fixture that keeps its state before this program
	// changed it: see [run.remember].
	instance object
	before   string
	// canWrite means that the token may make objects, fleet that it may see the racks.
	canWrite, fleet bool
	budget, free    int64
	freeCPUs        int64
	// made are the objects of this run that are not known to be gone, by ID. unanswered means that there may be more.
	made       map[string]object
	unanswered bool
	// ids are the IDs of fixtures. needed are the fixtures of the present case.
	ids    map[string]string
	needed map[string]bool
	// page is the page token of the last answer, noted the storage of the last utilization that a case asked to note.
	page  string
	noted int64
	// seen is the last state of an object, for the error of a wait.
	seen string
	// changing says since when an instance starts or stops.
	changing map[string]change
	// at is the place of the present request in the recording.
	at place
}

type change struct {
	what  string
	since time.Time
}

// Run plays the cases. It removes what it made even when ctx ends: it then finishes its request, and begins no case.
func Run(ctx context.Context, o Options) *Report {
	o.Wait, o.Pause = cmp.Or(o.Wait, 10*time.Minute), cmp.Or(o.Pause, time.Second)
	o.Budget = cmp.Or(o.Budget, DefaultBudget)
	if o.Progress == nil {
		o.Progress = io.Discard
	}
	r := &run{
		o: o, report: &Report{Format: reportFormat, Version: o.Version, Times: times{}},
		client: &client{
			http: o.HTTPClient, host: strings.TrimSuffix(o.Host, "/"), token: o.Token, agent: "oxide-sim-verify/" + o.Version,
		},
		made: map[string]object{}, ids: map[string]string{}, changing: map[string]change{},
	}
	r.record = newRecorder(o)
	err := r.guard(ctx)
	if err == nil {
		err = r.sweep(ctx, "what an earlier run left")
		if err == nil {
			err = errors.Join(r.play(ctx), r.sweep(context.WithoutCancel(ctx), "what this run made"))
		}
	}
	if err != nil {
		r.problem(err)
	}
	if err := r.record.finish(r.report); err != nil {
		r.problem(fmt.Errorf("the recording could not be written: %w", err))
	}
	return r.report
}

// problem tells the user why the run did not go to its end, and keeps it in the report without secrets.
func (r *run) problem(err error) {
	text := strings.ReplaceAll(err.Error(), "\n", "; ")
	fmt.Fprintf(r.o.Progress, "verify: %s\n", text)
	r.report.Problem = r.record.scrub(text)
}

// left tells the user what could not be removed, and keeps it in the report without secrets.
func (r *run) left(o object, why error) {
	fmt.Fprintf(r.o.Progress, "verify: not removed: %s (%s): %v\n", o, o.id, why)
	r.report.Left = append(r.report.Left, r.record.scrub(fmt.Sprintf("%s: %v", o, why)))
}

// DefaultBudget is enough for every case: an instance with 12 disks, and one more.
const DefaultBudget = 16 * gib

// send sends a request, and keeps what its answer says about objects and times. A request that was begun is finished
// even when ctx ends.
func (r *run) send(ctx context.Context, q request) (answer, error) {
	if err := ctx.Err(); err != nil {
		return answer{}, abort("stopped by a signal")
	}
	a := r.client.do(context.WithoutCancel(ctx), q)
	r.keep(q, a)
	r.record.add(r.at, q, a)
	switch {
	case a.err != nil:
		r.unanswered = r.unanswered || q.method == "POST"
		return a, fmt.Errorf("%w: %w", errTransient, a.err)
	case a.status == 401 && !q.anonymous:
		return a, abort("the rack does not accept the token")
	case slices.Contains([]int{500, 502, 503, 504}, a.status):
		r.unanswered = r.unanswered || q.method == "POST"
		return a, transientAnswer{q, a}
	}
	return a, nil
}

// transientAnswer is an answer that may be another one the next time.
type transientAnswer struct {
	q    request
	seen answer
}

func (e transientAnswer) Error() string { return fmt.Sprintf("%s: %s", e.q, e.seen) }

func isTransient(err error) bool {
	return errors.Is(err, errTransient) || errors.As(err, new(transientAnswer))
}

// keep notes new and deleted objects, their IDs, and how long changes took.
func (r *run) keep(q request, a answer) {
	path, _, _ := strings.Cut(q.path, "?")
	parts := strings.Split(strings.Trim(path, "/"), "/")
	o := objectFrom(parts[0], a.body)
	created := q.method == "POST" && a.status == 201
	switch {
	case a.status > 299 || a.err != nil:
		return
	case created && len(parts) == 1:
		r.made[o.id] = o
		r.ids[strings.TrimPrefix(o.name, namePrefix)] = o.id
	case q.method == "DELETE":
		for id, o := range r.made {
			if parts[0] == o.kind && (parts[1] == id || parts[1] == o.name) {
				delete(r.made, id)
			}
		}
	case q.method == "POST" && len(parts) == 3:
		r.changing[o.id] = change{parts[2], time.Now().Add(-a.took)}
	case q.method == "GET" && len(parts) == 2:
		if o.isOurs() { // the answer to its creation may have been lost
			r.made[o.id] = o
		}
		if c, is := r.changing[o.id]; is && o.state == map[string]string{"start": "running", "stop": "stopped"}[c.what] {
			r.report.Times.add(c.what+" instance", time.Since(c.since))
			delete(r.changing, o.id)
		}
	}
	switch {
	case created && parts[0] == disks:
		r.report.Times.add("create disk", a.took)
	case created && parts[0] == snapshots:
		r.report.Times.add("create snapshot", a.took)
	case q.method == "DELETE" && parts[0] == disks:
		r.report.Times.add("delete disk", a.took)
	case q.method == "POST" && len(parts) == 4:
		r.report.Times.add(parts[3]+" disk", a.took)
	}
}

// checkRole finds out whether a 403 or 404 is about the token. It then ends the run: whatever a token without its role
// sees says nothing about the rack.
func (r *run) checkRole(ctx context.Context, a answer) error {
	if a.status != 403 && a.status != 404 {
		return nil
	}
	b, err := r.send(ctx, request{method: "GET", path: "/projects/" + r.projectID})
	switch {
	case err != nil:
		return err
	case b.status != 200:
		return abort("the token does not see the project any more: %s", b)
	case a.status == 403 && r.canWrite:
		return abort("the token may not change the project any more: %s", a)
	}
	return nil
}

// guard checks that the run may begin: the rack, the token, the project's name, and that the project holds nothing
// foreign. It changes nothing.
func (r *run) guard(ctx context.Context) error {
	if err := r.negotiate(ctx); err != nil {
		return err
	}
	me, err := r.read(ctx, "/me")
	if err != nil {
		return err
	}
	r.record.scrubJSON(me.raw) // so that the names in it count as secrets
	r.fleet = show(get(me.body, "fleet_viewer")) == "true"
	project, err := r.read(ctx, "/projects/"+url.PathEscape(r.o.Project))
	if err != nil {
		return err
	}
	name := text(get(project.body, "name"))
	r.record.learnProject(name)
	switch {
	case project.status != 200:
		return abort("there is no project %q, or the token has no role in it: %s", r.o.Project, project)
	case name != r.o.EmptyProject:
		return abort("--empty-project=%s is not the project's name, which is %q", r.o.EmptyProject, name)
	}
	r.projectID = text(get(project.body, "id"))
	return r.checkEmpty(ctx)
}

// read sends a GET request until it is answered.
func (r *run) read(ctx context.Context, path string) (a answer, err error) {
	err = r.retry(ctx, func() (step, error) {
		a, err = r.send(ctx, request{method: "GET", path: path})
		return done, err
	})
	return a, err
}

// readQuota limits the budget to what the silo's quota leaves.
func (r *run) readQuota(ctx context.Context) error {
	a, err := r.read(ctx, "/utilization")
	if err != nil {
		return err
	}
	number := func(path string) int64 {
		n, _ := strconv.ParseInt(show(get(a.body, path)), 10, 64) // 0 if the rack does not say
		return n
	}
	r.free = number("capacity.storage") - number("provisioned.storage")
	r.freeCPUs = number("capacity.cpus") - number("provisioned.cpus")
	r.budget = min(r.o.Budget, max(0, r.free))
	r.report.Rack.QuotaBytes, r.report.Rack.FreeBytes = number("capacity.storage"), r.free
	return nil
}

// checkEmpty refuses a project that holds anything but what an earlier run left, and the instance of --instance with
// its disks.
func (r *run) checkEmpty(ctx context.Context) error {
	var foreign []string
	for _, kind := range kinds { // instances come first
		objects, err := r.list(ctx, "/"+kind+"?project="+r.projectID)
		if err != nil {
			return err
		}
		for _, o := range objects {
			switch {
			case o.isOurs():
				if key := strings.TrimPrefix(o.name, namePrefix); key == ran || key == stood {
					r.before = key
				}
			case kind == instances && o.name == r.o.Instance:
				r.instance = o
			case kind == disks && o.instance != "" && o.instance == r.instance.id:
			default:
				foreign = append(foreign, o.String())
				r.record.scrubText("", o.name)
			}
		}
	}
	if len(foreign) > 0 {
		return abort("the project is not empty: it has %s", few(foreign))
	}
	if r.o.Instance != "" && r.instance.id == "" {
		return abort("the project has no instance %q", r.o.Instance)
	}
	r.ids[theInstance] = r.instance.id
	return nil
}

// few joins the first of many names.
func few(names []string) string {
	const most = 10
	if len(names) <= most {
		return strings.Join(names, ", ")
	}
	return fmt.Sprintf("%s and %d more", strings.Join(names[:most], ", "), len(names)-most)
}

// list returns all objects of a list.
func (r *run) list(ctx context.Context, path string) (objects []object, err error) {
	kind := strings.Trim(path[:strings.Index(path, "?")], "/")
	for page := ""; ; {
		var a answer
		err := r.retry(ctx, func() (step, error) {
			a, err = r.act(ctx, request{method: "GET", path: path + "&limit=1000" + page}, 200)
			return done, err
		})
		if err != nil {
			return nil, err
		}
		items, _ := get(a.body, "items").([]any)
		for _, item := range items {
			objects = append(objects, objectFrom(kind, item))
		}
		next := text(get(a.body, "next_page"))
		if next == "" || len(items) == 0 {
			return objects, nil
		}
		page = "&page_token=" + url.QueryEscape(next)
	}
}

// play plays the cases. Its error ends the run early.
func (r *run) play(ctx context.Context) error {
	if err := errors.Join(r.readQuota(ctx), r.findRole(ctx)); err != nil {
		return err
	}
	chosen := slices.DeleteFunc(slices.Clone(cases), func(c testCase) bool {
		return len(r.o.Only) > 0 && !slices.Contains(r.o.Only, c.id)
	})
	p := newProgress(r.o.Progress, chosen)
	for _, c := range chosen {
		result, err := r.playCase(ctx, c)
		if err != nil {
			return fmt.Errorf("%s: %w", c.id, err)
		}
		r.report.Results = append(r.report.Results, result)
		p.played(c, result)
	}
	return nil
}

// findRole makes a group, which costs nothing, to learn whether the token may make anything.
func (r *run) findRole(ctx context.Context) error {
	err := r.establish(ctx, "probe")
	var refused unexpected
	if errors.As(err, &refused) && refused.seen.status == 403 {
		return nil
	}
	r.canWrite = err == nil
	return err
}

// playCase plays a case. It repeats one that met a transient failure, and one that others in the silo may have
// disturbed.
func (r *run) playCase(ctx context.Context, c testCase) (Result, error) {
	result := Result{ID: c.id, What: c.what, Outcome: NotTried}
	if result.Why = r.cannot(c); result.Why != "" {
		return result, nil
	}
	const attempts = 6
	for attempt := 1; ; attempt++ {
		again, err := r.attempt(ctx, c, &result)
		switch {
		case errors.As(err, new(abortError)) || ctx.Err() != nil:
			return result, err
		case isTransient(err) && attempt == attempts:
			result.Outcome, result.Why = NotTried, fmt.Sprintf("after %d attempts: %v", attempts, err)
			result.Failed = true
		case isTransient(err):
		case err != nil:
			r.explain(&result, c, err)
		}
		if again = again || isTransient(err); !again || attempt == attempts {
			result.Why = r.record.scrub(result.Why)
			return result, nil
		}
		if err := sleep(ctx, r.o.Pause); err != nil {
			return result, err
		}
	}
}

// explain turns an error of a preparation into the result of its case.
func (r *run) explain(result *Result, c testCase, err error) {
	var budget budgetError
	var refused unexpected
	switch {
	case errors.As(err, &budget):
		result.Outcome, result.Why = NotTried, err.Error()
	case errors.As(err, &refused):
		r.differs(result, c, "before the case: "+refused.q.String(), refused.want, refused.seen, false)
	default:
		result.Outcome, result.Why, result.Failed = NotTried, "it could not be prepared: "+err.Error(), true
	}
}

// differs makes the result one that differs.
func (r *run) differs(result *Result, c testCase, q, want string, seen answer, onlyWords bool) {
	result.Outcome, result.Why = Different, ""
	result.Request, result.Expected, result.Seen = r.record.scrub(q), r.record.known(want), r.record.answer(seen)
	result.Means, result.GoOn = c.rests, c.harm.advice()
	if onlyWords && strings.Contains(seen.message(), c.reads) {
		result.Means, result.GoOn = "Only a message differs. The plugin decides by status and code.", none.advice()
	}
}

// cannot returns why a case is not tried, or "".
func (r *run) cannot(c testCase) string {
	writes := c.given != "" || slices.ContainsFunc(c.asks, func(a ask) bool {
		reaches := a.want.status < 300 || a.want.code != "" // beyond routing and parsing
		return reaches && !a.anonymous && !strings.HasPrefix(a.request, "GET")
	})
	needsFree := c.need&smallQuota != 0
	switch {
	case c.need&viewer != 0 && r.canWrite:
		return "it needs the token of a viewer of the project; verify with such a token plays it"
	case c.need&viewer == 0 && writes && !r.canWrite:
		return "a role is missing: this token may not make anything in the project"
	case c.need&fleetViewer != 0 && !r.fleet:
		return "the token's user is no viewer of the fleet"
	case c.need&noFleetViewer != 0 && r.fleet:
		return "the token's user is a viewer of the fleet"
	case c.need&starts != 0 && !r.o.StartInstances:
		return "no running instance was allowed: --start-instances"
	case c.need&fullCPUs != 0 && r.freeCPUs > 0:
		return fmt.Sprintf("%d processors of the silo's quota are free, and the case needs a silo without any", r.freeCPUs)
	case needsFree && (r.free+gib > r.o.Budget || r.free < gib):
		return fmt.Sprintf(
			"%d GiB of the silo's quota are free: the case asks for 1 GiB more, and that must be within --budget",
			r.free/gib,
		)
	case c.need&guest != 0 && r.o.Instance == "":
		return "no instance was named that may be stopped: --instance"
	case c.need&guest != 0 && r.o.GuestCommand == "" && slices.ContainsFunc(c.asks, func(a ask) bool { return a.request == inGuest }):
		return "no command was given that looks into the guest: --guest-command"
	}
	return ""
}

// attempt plays a case once. again means that it is worth another attempt although nothing failed.
func (r *run) attempt(ctx context.Context, c testCase, result *Result) (again bool, err error) {
	*result = Result{ID: c.id, What: c.what, Outcome: AsAssumed}
	r.needed = map[string]bool{}
	for _, key := range c.keys() {
		r.needed[key] = true
	}
	r.at = place{Case: c.id, Prepares: true}
	for condition := range strings.SplitSeq(c.given, ", ") {
		if condition == "" {
			continue
		}
		if err := r.establish(ctx, condition); err != nil {
			return false, err
		}
	}
	for n, a := range c.asks {
		r.at = place{Case: c.id, Ask: n + 1}
		ok, err := r.ask(ctx, c, a, result)
		if err != nil || !ok {
			return c.noisy && result.Outcome == Different, err
		}
	}
	return false, nil
}

// ask sends a request of a case and compares the answer. ok means that the case goes on.
func (r *run) ask(ctx context.Context, c testCase, a ask, result *Result) (ok bool, err error) {
	if a.request == inGuest {
		return r.askGuest(ctx, c, a, result)
	}
	method, path, _ := strings.Cut(a.request, " ")
	q := request{method, r.fill(path), r.fill(a.body), a.anonymous, a.version}
	a.want.message = r.fill(a.want.message)
	a.has = slices.Clone(a.has)
	for n := range a.has { // before the answer: it may change which ID a fixture has
		a.has[n] = r.fill(a.has[n])
	}
	if size := newBytes(q); a.want.status == 201 && size > 0 {
		if err := r.reserve(ctx, size); err != nil {
			return false, err
		}
	}
	deadline := time.Now().Add(r.o.Wait)
	for {
		seen, err := r.sendAsked(ctx, a, q)
		if err != nil {
			return false, err
		}
		r.page = text(get(seen.body, "next_page"))
		fits, onlyWords, wanted := fits(q, a, seen)
		if fits {
			return true, r.checkAsked(ctx, c, a, q, seen, result)
		}
		for _, other := range a.or {
			if ok, _ := other.want.matches(seen); ok {
				return r.otherwise(other, result), nil
			}
		}
		if !a.until || time.Now().After(deadline) {
			if err := r.checkRole(ctx, seen); err != nil {
				return false, err
			}
			r.differs(result, c, q.String(), wanted, seen, onlyWords)
			return false, nil
		}
		if err := sleep(ctx, r.o.Pause); err != nil {
			return false, err
		}
	}
}

// sendAsked sends a request of a case. It repeats it after a transient failure if the answer to a repeated request must
// be the same. Otherwise the whole case is repeated.
func (r *run) sendAsked(ctx context.Context, a ask, q request) (seen answer, err error) {
	moves := strings.HasSuffix(q.path, "/attach") || strings.HasSuffix(q.path, "/detach")
	if q.method != http.MethodGet && a.want.status < 300 && !moves {
		return r.send(ctx, q)
	}
	err = r.retry(ctx, func() (step, error) {
		seen, err = r.send(ctx, q)
		return done, err
	})
	return seen, err
}

// fits compares an answer with what is expected, which it also returns as a text.
func fits(q request, a ask, seen answer) (fits, onlyWords bool, wanted string) {
	wanted = a.want.String()
	if fits, onlyWords = a.want.matches(seen); !fits {
		return fits, onlyWords, wanted
	}
	for _, condition := range a.has {
		wanted += ", " + condition
		fits = fits && holds(seen.body, condition)
	}
	if err := sdkReads(q, seen); err != nil {
		wanted += ", which the SDK reads: " + err.Error()
		fits = false
	}
	return fits, false, wanted
}

// checkAsked makes the further check of a request, and notes what later requests need.
func (r *run) checkAsked(ctx context.Context, c testCase, a ask, q request, seen answer, result *Result) error {
	if a.note {
		r.noted, _ = strconv.ParseInt(show(get(seen.body, "provisioned.storage")), 10, 64)
	}
	r.report.learn(a.fact)
	if a.check == nil {
		return nil
	}
	wrong, err := a.check(ctx, r, seen)
	if wrong != "" {
		r.differs(result, c, q.String(), wrong, seen, false)
	}
	return err
}

// otherwise handles an answer that a rack may give instead.
func (r *run) otherwise(o alternative, result *Result) (ok bool) {
	r.report.learn(o.fact)
	if o.skip != "" {
		result.Outcome, result.Why = NotTried, o.skip
		return false
	}
	return true
}

// newBytes is the size of the disk or snapshot that a request asks for.
func newBytes(q request) int64 {
	var body struct{ Size int64 }
	if q.method != "POST" || json.Unmarshal([]byte(q.body), &body) != nil {
		return 0
	}
	if strings.HasPrefix(q.path, "/"+snapshots) {
		return fixtureOf("big").gib * gib // no disk of a case is larger
	}
	return body.Size
}

var placeholder = regexp.MustCompile(`<[a-z0-9-]+>|\[[a-z0-9-]+\]|\{[a-zP+0-9]+\}`)

// fill replaces placeholders: <d> is the ID of a fixture, [d] its name, {p} the query of the project and {P} its ID,
// {next} the page token of the last answer, {free} the free bytes of the quota in whole GiB and {free+1} 1 GiB more,
// {used+2} the noted storage and 2 GiB.
func (r *run) fill(s string) string {
	whole := r.free / gib * gib
	return placeholder.ReplaceAllStringFunc(s, func(p string) string {
		word := p[1 : len(p)-1]
		switch {
		case p[0] == '<':
			return cmp.Or(r.ids[word], "missing")
		case p[0] == '[':
			return r.name(word)
		case word == "p":
			return "project=" + r.projectID
		case word == "P":
			return r.projectID
		case word == "next":
			return url.QueryEscape(r.page)
		case word == "free":
			return fmt.Sprint(whole)
		case word == "free+1":
			return fmt.Sprint(whole + gib)
		}
		if more, is := strings.CutPrefix(word, "used+"); is {
			n, _ := strconv.ParseInt(more, 10, 64)
			return fmt.Sprint(r.noted + n*gib)
		}
		return p
	})
}

func sleep(ctx context.Context, d time.Duration) error {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-ctx.Done():
		return abort("stopped by a signal")
	case <-timer.C:
		return nil
	}
}
