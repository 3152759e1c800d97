// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package orchestratortest

import (
	"context"
	"errors"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/oxidecomputer/oxide-csi-plugin/metadata"
	"github.com/oxidecomputer/oxide-csi-plugin/metadata/metadatatest"
	"github.com/oxidecomputer/oxide-csi-plugin/orchestrator"
)

const (
	idA, idB = "6f3a1c9e-2b7d-4e58-9a41-0d5c8e7f1a23", "b81d0f42-77c3-4c0a-8e6f-93a5d2b4c716"
	secret   = "oxide-token-canary"
)

// board is an orchestrator in memory, with these bugs.
type board struct {
	restartBugs
	mu      sync.Mutex
	nodes   map[string]*note
	fault   metadatatest.Fault
	repairs chan struct{}
	// looked and withdrawn are for the bug checksFirst: with it, every withdrawal comes between the look and the word.
	looked, withdrawn chan struct{}
}

type note struct {
	asked, about string
	said         orchestrator.RestartReply
}

// restartBugs are what the suite must find.
type restartBugs struct {
	forgetsAnswerWhenAskedAgain, answersForAnother, saysUnasked, withdrawsAnother, withdrawsNothing, withdrawsAccepted, forgetsAnother,
	leavesAnswer, losesReason, losesBoot, keepsInMemory, oneForAll, unknownIsFine, asksOnce, inventsQuestion, reportsOnce,
	checksFirst, downIsNothing, leaks, manyLines, ignoresContext, hidesContext, tellsNothing bool
}

func (b *board) enter(ctx context.Context) error {
	b.mu.Lock()
	fault, repaired := b.fault, b.repairs
	b.mu.Unlock()
	switch fault {
	case metadatatest.Slow:
		if b.ignoresContext {
			<-repaired
			return nil
		}
		select {
		case <-repaired:
			return nil
		case <-ctx.Done():
			if b.hidesContext {
				return errors.New("gave up")
			}
			return ctx.Err()
		}
	case "":
		return nil
	}
	if b.downIsNothing {
		return nil
	}
	text := "the orchestrator is " + string(fault)
	if b.leaks {
		text += secret
	}
	if b.manyLines {
		text += "\n"
	}
	return errors.New(text)
}

func (b *board) node(instanceID string) (*note, error) {
	if b.oneForAll {
		instanceID = idA
	}
	if n := b.nodes[instanceID]; n != nil {
		return n, nil
	}
	if b.unknownIsFine {
		return &note{}, nil
	}
	return nil, errors.New("no such instance")
}

type boardRequester struct {
	*board
	reported bool
}

func (a *boardRequester) Request(ctx context.Context, instanceID, restartID string) error {
	if err := a.enter(ctx); err != nil {
		return err
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	n, err := a.node(instanceID)
	if err == nil && n.asked == restartID && a.asksOnce {
		return errors.New("asked already")
	}
	if err == nil {
		n.asked = restartID
		if a.forgetsAnswerWhenAskedAgain {
			n.about = ""
		}
	}
	return err
}

func (a *boardRequester) Reply(ctx context.Context, instanceID, restartID string) (orchestrator.RestartReply, error) {
	if err := a.enter(ctx); err != nil {
		return nothing, err
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	n, err := a.node(instanceID)
	if err != nil || n.about != restartID && !a.answersForAnother {
		return nothing, err
	}
	return n.said, nil
}

func (a *boardRequester) Withdraw(
	ctx context.Context,
	instanceID, restartID string,
) (orchestrator.RestartReply, error) {
	if err := a.enter(ctx); err != nil {
		return nothing, err
	}
	if a.checksFirst {
		select {
		case <-a.looked:
			defer func() { a.withdrawn <- struct{}{} }()
		case <-ctx.Done():
		}
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	n, err := a.node(instanceID)
	if err != nil || a.withdrawsNothing || n.asked != restartID && !a.withdrawsAnother {
		return nothing, err
	}
	about, said := n.about, n.said
	if about != restartID {
		said = nothing
	}
	if said.State == orchestrator.RestartAccepted && !a.withdrawsAccepted {
		return said, nil
	}
	*n = note{}
	if a.leavesAnswer {
		n.about, n.said = about, said
	}
	return said, nil
}

func (a *boardRequester) Forget(ctx context.Context, instanceID, restartID string) error {
	if err := a.enter(ctx); err != nil {
		return err
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	n, err := a.node(instanceID)
	if err == nil && (n.asked == restartID || a.forgetsAnother) {
		*n = note{}
	}
	return err
}

func (a *boardRequester) Report(ctx context.Context, _ string, _ orchestrator.Report) error {
	if err := a.enter(ctx); err != nil {
		return err
	}
	if a.reported && a.reportsOnce {
		return errors.New("it stands already")
	}
	a.reported = true
	return nil
}

type boardListener struct {
	*board
	instanceID string
	said       orchestrator.RestartReply
}

func (l *boardListener) Requested(ctx context.Context) (string, orchestrator.RestartReply, error) {
	if err := l.enter(ctx); err != nil {
		return "", nothing, err
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	n, err := l.node(l.instanceID)
	if err == nil && n.asked == "" && l.inventsQuestion {
		return restartB, nothing, nil
	}
	if err != nil || n.asked == "" {
		return "", nothing, err
	}
	if l.keepsInMemory {
		return n.asked, l.said, nil
	}
	if n.about != n.asked {
		return n.asked, nothing, nil
	}
	return n.asked, n.said, nil
}

func (l *boardListener) Changes(ctx context.Context) <-chan struct{} {
	changes := make(chan struct{}, 1)
	changes <- struct{}{}
	go func() {
		for !l.tellsNothing && ctx.Err() == nil {
			time.Sleep(time.Millisecond)
			metadata.Signal(changes)
		}
	}()
	return changes
}

func (l *boardListener) Reply(ctx context.Context, restartID string, answer orchestrator.RestartReply) error {
	if err := l.enter(ctx); err != nil {
		return err
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	n, err := l.node(l.instanceID)
	if err != nil {
		return err
	}
	asked := n.asked
	if l.checksFirst {
		l.mu.Unlock()
		select {
		case l.looked <- struct{}{}:
			<-l.withdrawn
		case <-ctx.Done():
		}
		l.mu.Lock()
	}
	if asked != restartID && !l.saysUnasked {
		return errors.New("not asked")
	}
	if l.losesReason {
		answer.Reason = ""
	}
	if l.losesBoot {
		answer.Boot = ""
	}
	n.about, n.said, l.said = restartID, answer, answer
	return nil
}

func restartHarness(t *testing.T, bugs restartBugs) RestartHarness {
	b := &board{
		restartBugs: bugs,
		nodes:       map[string]*note{idA: {}, idB: {}},
		repairs:     make(chan struct{}),
		looked:      make(chan struct{}),
		withdrawn:   make(chan struct{}),
	}
	repair := func() {
		b.mu.Lock()
		defer b.mu.Unlock()
		b.fault = ""
		close(b.repairs)
		b.repairs = make(chan struct{})
	}
	t.Cleanup(repair) // lets go of calls that a bug left behind
	return RestartHarness{
		NewRequester: func() orchestrator.RestartRequester { return &boardRequester{board: b} },
		NewListener:  func() orchestrator.RestartListener { return &boardListener{board: b, instanceID: idA} },
		NewOther:     func() orchestrator.RestartListener { return &boardListener{board: b, instanceID: idB} },
		Instance:     idA, Other: idB,
		Break: func(f metadatatest.Fault) {
			b.mu.Lock()
			defer b.mu.Unlock()
			b.fault = f
		},
		Repair: repair, Secrets: []string{secret},
	}
}

func TestAGoodCarrierPasses(t *testing.T) {
	RunRestart(t, func(t *testing.T) RestartHarness { return restartHarness(t, restartBugs{}) })
}

func TestEveryRestartBugIsFound(t *testing.T) {
	failed := map[string]bool{}
	for _, tt := range []struct {
		name string
		bugs restartBugs
		in   string // a case that must find it
	}{
		{"makes a question up", restartBugs{inventsQuestion: true}, "no request"},
		{"asks once", restartBugs{asksOnce: true}, "request"},
		{"tells of no change", restartBugs{tellsNothing: true}, "changes"},
		{"forgets the answer when asked again", restartBugs{forgetsAnswerWhenAskedAgain: true}, "accepted, and back"},
		{"keeps what was said in memory", restartBugs{keepsInMemory: true}, "accepted, and back"},
		{"loses the boot", restartBugs{losesBoot: true}, "accepted, and back"},
		{"leaves the answer", restartBugs{leavesAnswer: true}, "accepted, and back"},
		{"loses the reason", restartBugs{losesReason: true}, "refused"},
		{"takes an answer for another's", restartBugs{answersForAnother: true}, "another restart"},
		{"answers unasked", restartBugs{saysUnasked: true}, "reply without a request"},
		{"withdraws another", restartBugs{withdrawsAnother: true}, "withdrawn"},
		{"withdraws what was accepted", restartBugs{withdrawsAccepted: true}, "withdrawn after it was accepted"},
		{"forgets another", restartBugs{forgetsAnother: true}, "forgotten"},
		{"withdraws nothing", restartBugs{withdrawsNothing: true}, "withdrawn"},
		{"looks before it speaks", restartBugs{checksFirst: true}, "withdrawn while it is answered"},
		{"one note for all", restartBugs{oneForAll: true}, "two nodes"},
		{"knows every instance", restartBugs{unknownIsFine: true}, "unknown instance"},
		{"reports once", restartBugs{reportsOnce: true}, "report"},
		{"down is nothing", restartBugs{downIsNothing: true}, "down, then up"},
		{"shows a secret", restartBugs{leaks: true}, "denied, then granted"},
		{"several lines", restartBugs{manyLines: true}, "denied, then granted"},
		{"ignores its context", restartBugs{ignoresContext: true}, "slow"},
		{"hides its context's error", restartBugs{hidesContext: true}, "slow"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			for _, c := range restartCases {
				if c.name != tt.in {
					continue
				}
				failed[c.name] = true
				// A bug is seen because a call goes on, or because a signal does not come: both in real time.
				const soon, signalTimeout = 100 * time.Millisecond, 100 * time.Millisecond
				if problems := c.check(restartHarness(t, tt.bugs), soon, signalTimeout); len(problems) == 0 {
					t.Errorf("case %q finds nothing", tt.in)
				} else if strings.Contains(strings.Join(problems, ""), secret) {
					t.Error("the suite shows the secret")
				}
			}
		})
	}
	for _, c := range restartCases {
		if !failed[c.name] {
			t.Errorf("no bug here makes case %q fail", c.name)
		}
	}
}
