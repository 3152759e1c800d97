// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package rack

import (
	"context"
	"errors"
	"fmt"
)

// Check verifies that the rack can be used as configured, and returns the project's ID. It asks the rack for the
// project each time. Its error is one sentence that ends with the next step.
func (c *Client) Check(ctx context.Context) (projectID string, err error) {
	_, err = c.versions.version(ctx, c.host)
	switch {
	case errors.Is(err, errOldRelease), errors.Is(err, errNoCommonVersion):
		return "", fmt.Errorf("rack %q at %s: %w", c.name, c.host.Host, err)
	case err != nil:
		err = c.translate(ctx, err, "reach %s", c.host.Host)
		return "", advised{err, "see that the host is the rack's API and can be reached from here"}
	}
	projectID, err = c.lookUpProject(ctx)
	return projectID, addAdvice(err)
}

// advised is an error with the next step.
type advised struct {
	error
	next string
}

func (e advised) Error() string { return e.error.Error() + ": " + e.next }
func (e advised) Unwrap() error { return e.error }

// WithoutAdvice returns the error of [Client.Check] without its next step, for a caller that has a better one.
func WithoutAdvice(err error) error {
	if e, ok := errors.AsType[advised](err); ok {
		return e.error
	}
	return err
}

// addAdvice adds the next step to an error that the rack returned.
func addAdvice(err error) error {
	switch {
	case errors.Is(err, ErrUnauthenticated):
		return advised{err, "give a token of this silo that has not expired"}
	case errors.Is(err, ErrProject):
		return advised{err, "correct the project, or give the user of the token a role on it"}
	}
	return err
}
