// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package rack

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"

	"github.com/oxidecomputer/oxide-csi-plugin/core/rack/diskname"
)

// maxAnswer is the largest answer that is read, in bytes. A page of [maxPage] disks with the longest names and
// descriptions has less than 4 MiB.
const maxAnswer = 8 << 20

// boundedAnswers reads each answer to its end. An answer that was cut off is an error, as no answer is. It limits the
// size of answers, so that a broken server cannot use up the memory. It also rejects a success that no rack would
// answer: a page for people, and that of a deletion, which has no body that could be compared with what was asked.
type boundedAnswers struct{ next http.RoundTripper }

var _ http.RoundTripper = boundedAnswers{}

func (b boundedAnswers) RoundTrip(req *http.Request) (*http.Response, error) {
	resp, err := b.next.RoundTrip(req)
	if err != nil {
		return nil, err
	}
	body, err := io.ReadAll(http.MaxBytesReader(nil, resp.Body, maxAnswer))
	if err := errors.Join(err, resp.Body.Close()); err != nil {
		return nil, fmt.Errorf("read its response: %w", err)
	}
	resp.Body, resp.Request = io.NopCloser(bytes.NewReader(body)), req // the request is for classify
	status, kind := resp.StatusCode, resp.Header.Get("Content-Type")
	switch {
	case status >= http.StatusMultipleChoices:
	case strings.HasPrefix(kind, "text/html"):
		return nil, fmt.Errorf("%w: a page in HTML: check --oxide-host and the proxies before it", ErrProxy)
	case req.Method == http.MethodDelete && status != http.StatusNoContent:
		return nil, fmt.Errorf("its response is wrong: HTTP %d, and every rack returns 204 for a deletion", status)
	}
	return resp, nil
}

// errAnswer means that an answer is not about what was asked, or is no answer of a rack at all. It is an
// [ErrUnavailable]: a change may have been made.
var errAnswer = fmt.Errorf("%w: its response is wrong", ErrUnavailable)

// identity says which object an answer is about. For a request, empty fields are not known and not compared.
type identity struct{ id, name, projectID string }

// checkAnswer compares what an answer is about with what was asked. Without this check an answer such as {} would look
// like a disk without an ID.
func (c *Client) checkAnswer(got, asked identity, doing string, args ...any) error {
	wrong := ""
	_, valid := diskname.ParseID(got.id)
	switch {
	case !valid:
		wrong = fmt.Sprintf("its ID is %.40q", got.id)
	case asked.id != "" && got.id != asked.id:
		wrong = fmt.Sprintf("its ID is %s", got.id)
	case asked.name != "" && got.name != asked.name:
		wrong = fmt.Sprintf("its name is %.64q", got.name)
	case asked.projectID != "" && got.projectID != asked.projectID:
		wrong = fmt.Sprintf("its project is %.40q", got.projectID)
	default:
		return nil
	}
	return fmt.Errorf("rack %q: %s: %w: %s", c.name, fmt.Sprintf(doing, args...), errAnswer, wrong)
}

// checkDisk is [Client.checkAnswer] for a disk. It also rejects a disk without a state: a disk without an instance
// would count as detached. The disk that it returns has the ID of its volume.
func (c *Client) checkDisk(d Disk, asked identity, doing string, args ...any) (Disk, error) {
	if err := c.checkAnswer(identity{string(d.ID), d.Name, d.ProjectID}, asked, doing, args...); err != nil {
		return Disk{}, err
	}
	held := d.State == Attaching || d.State == Attached || d.State == Detaching
	if d.State == "" || held && d.InstanceID == "" {
		return Disk{}, fmt.Errorf(
			"rack %q: %s: %w: its state is %q of instance %q",
			c.name,
			fmt.Sprintf(doing, args...),
			errAnswer,
			d.State,
			d.InstanceID,
		)
	}
	return asVolume(d), nil
}

// lookedUp is [Client.checkDisk] for a disk that the caller works on. It returns [record.ErrFormat] for one whose
// description it would misread, and [ErrUnknown] together with a disk that can only be shown.
func (c *Client) lookedUp(d Disk, asked identity, doing string, args ...any) (Disk, error) {
	d, err := c.checkDisk(d, asked, doing, args...)
	if err == nil {
		err = checkFormat(fmt.Sprintf("rack %q: disk %q", c.name, d.Name), d.Description)
	}
	if err != nil {
		return Disk{}, err
	}
	return d, d.CheckKnown()
}

// checkDisks is [Client.checkDisk] for each disk of a page.
func (c *Client) checkDisks(items []sdkDisk, doing string, args ...any) ([]Disk, error) {
	if err := checkPage(c, items, doing, args...); err != nil {
		return nil, err
	}
	disks := convert(items, diskFrom)
	for i, disk := range disks {
		var err error
		if disks[i], err = c.checkDisk(disk, identity{}, doing, args...); err != nil {
			return nil, err
		}
	}
	return disks, nil
}

// checkSnapshot is [Client.checkAnswer] for a snapshot. It returns [record.ErrFormat] for one whose description it
// would misread, and [ErrUnknown] together with a snapshot that can only be shown.
func (c *Client) checkSnapshot(s Snapshot, asked identity, doing string, args ...any) (Snapshot, error) {
	if err := c.checkAnswer(identity{s.ID, s.Name, s.ProjectID}, asked, doing, args...); err != nil {
		return Snapshot{}, err
	}
	if err := checkFormat(fmt.Sprintf("rack %q: snapshot %q", c.name, s.Name), s.Description); err != nil {
		return Snapshot{}, err
	}
	return s, s.CheckKnown()
}

// checkPage rejects a page without a list of items. The page {} would otherwise end a list, and each volume that it
// leaves out would count as deleted.
func checkPage[T any](c *Client, items []T, doing string, args ...any) error {
	if items == nil {
		return fmt.Errorf("rack %q: %s: %w: it has no items", c.name, fmt.Sprintf(doing, args...), errAnswer)
	}
	return nil
}
