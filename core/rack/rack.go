// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package rack

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"net/url"
	"sync"
	"time"

	"github.com/oxidecomputer/oxide.go/oxide"

	"github.com/oxidecomputer/oxide-csi-plugin/core/fault"
	"github.com/oxidecomputer/oxide-csi-plugin/core/rack/diskname"
)

// Config says which rack a [Client] uses, and with which credentials.
type Config struct {
	// Name is the rack's name in the topology.
	Name string
	// Host is the URL of the API, for instance "https://silo.sys.rack.example".
	Host string
	// Project is the name or ID of the project in which disks are made.
	Project string
	// Token gives the credentials.
	Token Token
	// UserAgent is the User-Agent header of all requests.
	UserAgent string
	// MaxDisks is how many disks an instance can have, its boot disk included. 0 means that this is not known.
	MaxDisks int
	// HTTPClient sends the requests, see [NewHTTPClient]. Nil means a client that trusts the system's root
	// certificates.
	HTTPClient *http.Client
	// Log receives what the client learns about the rack. Nil discards it.
	Log *slog.Logger
	// Observe is called for every request. It may be nil.
	Observe Observe
	// LostAnswerWait is how long a change other than a deletion waits after its answer was lost, before it is repeated or
	// fails. 0 means 5 seconds, the only safe value; tests on a rack without delays set less.
	LostAnswerWait time.Duration
}

// Client calls the API of one rack. It is safe for concurrent use.
type Client struct {
	sdk      operations
	versions *versionNegotiator
	limiter  *limiter
	host     *url.URL
	name     string
	project  string
	maxDisks int

	mu        sync.Mutex
	projectID string
	// disks maps the ID of a volume that grew to the ID of its disk.
	disks map[string]DiskID

	// denied receives when an answer shows that the token or the project may be wrong.
	denied chan struct{}
}

// New returns a client. It sends no request.
func New(cfg Config) (*Client, error) {
	log := cfg.Log
	if log == nil {
		log = slog.New(slog.DiscardHandler)
	}
	host, err := url.Parse(cfg.Host)
	if err != nil {
		return nil, fmt.Errorf("rack %q: host: %w", cfg.Name, err)
	}
	client, versions, limiter := newTransport(cfg, log.With("rack", cfg.Name))
	// Host and token are always given: otherwise the SDK would read them, or a profile, from the environment. This
	// token is a placeholder: the transport sets the real token on each request.
	sdk, err := oxide.NewClient(
		oxide.WithHost(cfg.Host),
		oxide.WithToken("replaced-by-transport"),
		oxide.WithHTTPClient(client),
		oxide.WithUserAgent(cfg.UserAgent),
	)
	if err != nil {
		return nil, fmt.Errorf("rack %q at %s: %w", cfg.Name, cfg.Host, err)
	}
	return &Client{
		sdk: sdkClient{sdk}, versions: versions, limiter: limiter, host: host, name: cfg.Name, project: cfg.Project,
		maxDisks: cfg.MaxDisks,
		disks:    map[string]DiskID{}, denied: make(chan struct{}, 1),
	}, nil
}

// operations are the SDK methods that this package calls.
type operations interface {
	DiskCreate(context.Context, oxide.DiskCreateParams) (*sdkDisk, error)
	DiskView(context.Context, oxide.DiskViewParams) (*sdkDisk, error)
	DiskList(context.Context, oxide.DiskListParams) (*sdkDiskPage, error)
	DiskDelete(context.Context, oxide.DiskDeleteParams) error
	SnapshotCreate(context.Context, oxide.SnapshotCreateParams) (*oxide.Snapshot, error)
	SnapshotView(context.Context, oxide.SnapshotViewParams) (*oxide.Snapshot, error)
	SnapshotList(context.Context, oxide.SnapshotListParams) (*oxide.SnapshotResultsPage, error)
	SnapshotDelete(context.Context, oxide.SnapshotDeleteParams) error
	InstanceView(context.Context, oxide.InstanceViewParams) (*oxide.Instance, error)
	InstanceList(context.Context, oxide.InstanceListParams) (*oxide.InstanceResultsPage, error)
	InstanceDiskList(context.Context, oxide.InstanceDiskListParams) (*sdkDiskPage, error)
	InstanceDiskAttach(context.Context, oxide.InstanceDiskAttachParams) (*sdkDisk, error)
	InstanceDiskDetach(context.Context, oxide.InstanceDiskDetachParams) (*sdkDisk, error)
	InstanceStop(context.Context, oxide.InstanceStopParams) (*oxide.Instance, error)
	InstanceStart(context.Context, oxide.InstanceStartParams) (*oxide.Instance, error)
	ProjectView(context.Context, oxide.ProjectViewParams) (*oxide.Project, error)
	UtilizationView(context.Context) (*oxide.Utilization, error)
	CurrentUserAccessTokenList(
		context.Context, oxide.CurrentUserAccessTokenListParams) (*oxide.DeviceAccessTokenResultsPage, error)
	CurrentUserView(context.Context) (*oxide.CurrentUser, error)
	CurrentUserGroups(context.Context, oxide.CurrentUserGroupsParams) (*oxide.GroupResultsPage, error)
	ProjectPolicyView(context.Context, oxide.ProjectPolicyViewParams) (*oxide.ProjectRolePolicy, error)
	PolicyView(context.Context) (*oxide.SiloRolePolicy, error)

	AntiAffinityGroupList(context.Context, oxide.AntiAffinityGroupListParams) (*oxide.AntiAffinityGroupResultsPage, error)
	AntiAffinityGroupView(context.Context, oxide.AntiAffinityGroupViewParams) (*oxide.AntiAffinityGroup, error)
	AntiAffinityGroupCreate(context.Context, oxide.AntiAffinityGroupCreateParams) (*oxide.AntiAffinityGroup, error)
	AntiAffinityGroupUpdate(context.Context, oxide.AntiAffinityGroupUpdateParams) (*oxide.AntiAffinityGroup, error)
	AntiAffinityGroupDelete(context.Context, oxide.AntiAffinityGroupDeleteParams) error
}

// Name is the rack's name in the topology.
func (c *Client) Name() string { return c.name }

// ProjectName is the configured project, a name or an ID.
func (c *Client) ProjectName() string { return c.project }

// State is the state of a disk (docs/reference/rack.md §2).
type State string

// The states that this plugin distinguishes.
const (
	Creating    = State(oxide.DiskStateStateCreating)
	Detached    = State(oxide.DiskStateStateDetached)
	Attaching   = State(oxide.DiskStateStateAttaching)
	Attached    = State(oxide.DiskStateStateAttached)
	Detaching   = State(oxide.DiskStateStateDetaching)
	Maintenance = State(oxide.DiskStateStateMaintenance)
	Faulted     = State(oxide.DiskStateStateFaulted)
)

// Transient reports whether the rack ends this state by itself.
func (s State) Transient() bool {
	return s == Creating || s == Attaching || s == Detaching || s == Maintenance
}

// DiskID is [diskname.DiskID].
type DiskID = diskname.DiskID

// Disk is a disk as the rack describes it.
type Disk struct {
	// VolumeID is the ID of the volume, which is that of its first disk.
	VolumeID    string
	ID          DiskID
	Name        string
	Description string
	ProjectID   string
	// SizeBytes is the size of the disk, CreatedBytes that of the volume's first disk.
	SizeBytes    int64
	CreatedBytes int64
	BlockSize    int64
	// Local marks a disk on the sled of its instance. Other disks are distributed over the rack.
	Local    bool
	ReadOnly bool
	State    State
	// Unknown says what of the disk this version of the plugin does not know, such as its state, or is empty. Such a disk
	// is shown and left alone, see [ErrUnknown].
	Unknown string
	// InstanceID is the instance that holds the disk. It is set in the states attaching, attached and detaching. In an
	// unknown state, its absence proves nothing.
	InstanceID string
	// SnapshotID or ImageID is the source of the volume's first disk. Both are empty for a disk that was created blank.
	SnapshotID string
	ImageID    string
	// Created and VolumeCreated are by the rack's clock: of this disk, and of the volume's first disk.
	Created       time.Time
	VolumeCreated time.Time
}

// CheckKnown returns [ErrUnknown] for a disk that can only be shown.
func (d Disk) CheckKnown() error {
	if d.Unknown == "" {
		return nil
	}
	return fmt.Errorf("disk %q (%s) has the %s: %w", d.Name, d.ID, d.Unknown, ErrUnknown)
}

// CheckSerial returns an [ErrRefused] if one of an instance's disks has the NVMe serial of this disk
// (docs/reference/rack.md §9). The disks may include this one.
func (d Disk) CheckSerial(disks []Disk) error {
	for _, other := range disks {
		if other.VolumeID != d.VolumeID && diskname.Serial(other.Name) == diskname.Serial(d.Name) {
			return fault.SerialCollision.Errorf(
				"disk %s and disk %s have the same first %d bytes in their names, so the guest would see only one: %w",
				d.ID,
				other.ID,
				diskname.SerialBytes,
				ErrRefused,
			)
		}
	}
	return nil
}

func diskFrom(d *sdkDisk) Disk {
	return Disk{
		VolumeID:    d.Id,
		ID:          DiskID(d.Id),
		Name:        string(d.Name),
		Description: d.Description,
		ProjectID:   d.ProjectId,
		SizeBytes:   int64(d.Size), // at most 2^63-1 (docs/reference/rack.md §2)
		BlockSize:   int64(d.BlockSize),
		Local:       d.DiskType == oxide.DiskTypeLocal,
		ReadOnly:    d.ReadOnly != nil && *d.ReadOnly,
		State:       d.State.State,
		Unknown:     d.unknown(),
		InstanceID:  d.State.Instance,
		SnapshotID:  d.SnapshotId,
		ImageID:     d.ImageId,
		Created:     timeOrZero(d.TimeCreated),
	}
}

// DiskSpec describes a disk to create.
type DiskSpec struct {
	Name        string
	Description string
	// SizeBytes must be a multiple of 1 GiB. The rack checks this.
	SizeBytes int64
	// BlockSize is 512, 2048 or 4096. A local disk has 4096. A disk from a snapshot has the block size of the
	// snapshot's disk.
	BlockSize int64
	Local     bool
	// SnapshotID is the source of the disk. Empty means a blank disk.
	SnapshotID string
	// ReadOnly is possible only for a disk from a snapshot of the same size.
	ReadOnly bool
}

func (d DiskSpec) backend() oxide.DiskBackend {
	switch {
	case d.Local:
		return oxide.DiskBackend{Value: &oxide.DiskBackendLocal{}}
	case d.SnapshotID != "":
		source := oxide.DiskSource{Value: &oxide.DiskSourceSnapshot{SnapshotId: d.SnapshotID, ReadOnly: &d.ReadOnly}}
		return oxide.DiskBackend{Value: &oxide.DiskBackendDistributed{DiskSource: source}}
	}
	source := oxide.DiskSource{Value: &oxide.DiskSourceBlank{BlockSize: oxide.BlockSize(d.BlockSize)}}
	return oxide.DiskBackend{Value: &oxide.DiskBackendDistributed{DiskSource: source}}
}

// CreateDisk creates a disk. The answer says creating even if the disk is ready (docs/reference/rack.md §2).
func (c *Client) CreateDisk(ctx context.Context, disk DiskSpec) (Disk, error) {
	created, err := c.sdk.DiskCreate(ctx, oxide.DiskCreateParams{
		Project: c.projectRef(),
		Body: &oxide.DiskCreate{
			Name:        oxide.Name(disk.Name),
			Description: disk.Description,
			Size:        oxide.ByteCount(disk.SizeBytes),
			DiskBackend: disk.backend(),
		},
	})
	if err != nil {
		return Disk{}, c.translate(
			ctx,
			err,
			"create disk %q of %dGiB in project %q",
			disk.Name,
			disk.SizeBytes>>30,
			c.project,
		)
	}
	made, err := c.lookedUp(
		diskFrom(created), identity{name: disk.Name, projectID: c.knownProjectID()}, "create disk %q", disk.Name)
	if err == nil {
		c.rememberDisk(made)
	}
	return made, err
}

// DiskByName returns a disk of the project by its name. For a project that does not exist, the error is [ErrProject]. A
// token that has lost its role gets [ErrNotFound], so a caller that ends something for good confirms it
// ([Client.ConfirmProject]).
func (c *Client) DiskByName(ctx context.Context, name string) (Disk, error) {
	disk, err := c.sdk.DiskView(ctx, oxide.DiskViewParams{Disk: oxide.NameOrId(name), Project: c.projectRef()})
	if err != nil {
		return Disk{}, c.confirmNotFound(ctx, c.translate(ctx, err, "look up disk %q in project %q", name, c.project))
	}
	return c.lookedUp(diskFrom(disk), identity{name: name, projectID: c.knownProjectID()}, "look up disk %q", name)
}

// translate calls the package's [translate] with the rack's name as prefix.
func (c *Client) translate(ctx context.Context, err error, doing string, args ...any) error {
	if err == nil {
		return nil
	}
	err = translate(ctx, err, "rack %q: "+doing, append([]any{c.name}, args...)...)
	if errors.Is(err, ErrUnauthenticated) || errors.Is(err, ErrForbidden) || errors.Is(err, ErrProject) {
		select {
		case c.denied <- struct{}{}:
		default:
		}
	}
	return err
}

// Denied returns a channel that receives after an answer that shows that the token or the project may be wrong. Several
// answers can make one signal. [Client.Check] then says whether they are.
func (c *Client) Denied() <-chan struct{} { return c.denied }

// ProjectID returns the ID of the configured project. It asks the rack once and then uses the cached ID.
func (c *Client) ProjectID(ctx context.Context) (string, error) {
	if known := c.knownProjectID(); known != "" {
		return known, nil
	}
	return c.lookUpProject(ctx)
}

// knownProjectID is the project's ID, or "" until the rack was asked for it.
func (c *Client) knownProjectID() string {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.projectID
}

// projectRef is the project as requests name it: by its ID if that is known. This detects two changes: a host that now
// leads to another silo, and a project that was deleted and created again under its name. The rack then answers that
// the project does not exist, instead of listing another project's disks.
func (c *Client) projectRef() oxide.NameOrId {
	return oxide.NameOrId(cmp.Or(c.knownProjectID(), c.project))
}

// lookUpProject asks the rack for the project. It keeps the first ID that it received, and fails if a later one
// differs.
func (c *Client) lookUpProject(ctx context.Context) (string, error) {
	project, err := c.sdk.ProjectView(ctx, oxide.ProjectViewParams{Project: oxide.NameOrId(c.project)})
	if err != nil {
		err = c.translate(ctx, err, "look up project %q", c.project)
		switch {
		case errors.Is(err, ErrNotFound):
			// This error must not count as ErrNotFound: a caller would take its disk for deleted.
			err = fmt.Errorf("%w: %v", ErrProject, err)
		case errors.Is(err, ErrForbidden):
			err = fmt.Errorf("%w: %w", ErrProject, err)
		}
		return "", err
	}
	asked := identity{name: c.project}
	if id, isID := diskname.ParseID(c.project); isID {
		asked = identity{id: id}
	}
	got := identity{id: project.Id, name: string(project.Name)}
	if err := c.checkAnswer(got, asked, "look up project %q", c.project); err != nil {
		return "", err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.projectID == "" {
		c.projectID = project.Id
	}
	if c.projectID != project.Id {
		return "", fmt.Errorf(
			"rack %q: project %q had the ID %s and now has %s: %w",
			c.name,
			c.project,
			c.projectID,
			project.Id,
			ErrProject,
		)
	}
	return project.Id, nil
}

// confirmNotFound checks the project if a 404 may be about the project, and not about the disk or snapshot of that
// name.
func (c *Client) confirmNotFound(ctx context.Context, err error) error {
	if errors.Is(err, errUnconfirmedNotFound) {
		if unconfirmed := c.ConfirmProject(ctx); unconfirmed != nil {
			return unconfirmed
		}
	}
	return err
}

// ConfirmProject checks that the token still sees the same project as before. Only then does a 404 for a disk or an
// instance mean that it is gone: a token that lost its role gets 404 for everything (docs/reference/rack.md §1). Its
// error is never an [ErrNotFound].
func (c *Client) ConfirmProject(ctx context.Context) error {
	if _, err := c.lookUpProject(ctx); err != nil {
		return c.notBelieved(err)
	}
	return nil
}

// notBelieved is the error for a 404 while the project cannot be seen, for the reason err.
func (c *Client) notBelieved(err error) error {
	return fmt.Errorf("\"not found\" cannot be believed: %w: check the token and its role on project %q", err, c.project)
}

// timeOrZero returns the zero time for nil.
func timeOrZero(t *time.Time) time.Time {
	if t == nil {
		return time.Time{}
	}
	return *t
}
