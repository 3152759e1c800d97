package core

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strconv"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/oxidecomputer/oxide-csi-plugin/core/rack"
)

// Controller is the CSI Controller service: it talks to the rack and never touches a device.
type Controller struct {
	csi.UnimplementedControllerServer

	rack     *rack.Client
	cluster  string
	maxDisks int
	grace    *detachGrace
	refusals *refusals
	log      *slog.Logger
}

// ControllerOptions configure a [Controller].
type ControllerOptions struct {
	Rack *rack.Client
	// Cluster tells apart clusters that share a project.
	Cluster string
	// MaxDisks is how many disks an instance takes, its boot disk included.
	MaxDisks int
	// DetachGrace is how old a wish to detach from a running instance must be before it is tried.
	DetachGrace time.Duration
	Log         *slog.Logger
}

// NewController returns the Controller service.
func NewController(opts ControllerOptions) *Controller {
	return &Controller{
		rack:     opts.Rack,
		cluster:  opts.Cluster,
		maxDisks: opts.MaxDisks,
		grace:    newDetachGrace(opts.DetachGrace),
		refusals: newRefusals(),
		log:      opts.Log,
	}
}

// CreateVolume makes a blank disk. The name of the disk follows from the volume's, so that a repetition finds it: CSI
// spec, CreateVolume. What a failed create left behind is looked up before anything is answered, since the rack may have
// made the disk and lost the answer, or may refuse a name that exists for want of quota (docs/rack.md §2).
func (c *Controller) CreateVolume(ctx context.Context, req *csi.CreateVolumeRequest) (*csi.CreateVolumeResponse, error) {
	if err := validateCreateVolume(req); err != nil {
		return nil, err
	}
	params, err := parseParameters(req.GetParameters(), req.GetVolumeCapabilities())
	if err != nil {
		return nil, err
	}
	if err := checkAccessible(req.GetAccessibilityRequirements(), c.rack.Name()); err != nil {
		return nil, err
	}
	size, err := sizeOf(req.GetCapacityRange())
	if err != nil {
		return nil, err
	}
	wanted := rack.NewDescription(c.cluster, req.GetName(), params.claim)
	disk, err := c.rack.CreateDisk(ctx, rack.BlankDisk{
		Name:        rack.DiskName(c.cluster, req.GetName()),
		Description: wanted.Encode(),
		SizeBytes:   size,
		BlockSize:   cmp.Or(params.blockSize, defaultBlockSize),
		Local:       params.diskType == diskTypeLocal,
	})
	if err != nil {
		if disk, err = c.existing(ctx, req, params, wanted, err); err != nil {
			return nil, err
		}
	}
	return &csi.CreateVolumeResponse{Volume: &csi.Volume{
		VolumeId:           disk.ID,
		CapacityBytes:      disk.SizeBytes,
		VolumeContext:      volumeContext(disk, params),
		AccessibleTopology: []*csi.Topology{segments(c.rack.Name())},
	}}, nil
}

// existing settles a create that the rack did not answer with a disk: it returns the disk where it is there after all and
// is what was asked for, and otherwise the error to answer.
func (c *Controller) existing(ctx context.Context, req *csi.CreateVolumeRequest, params parameters, wanted rack.Description, createErr error) (rack.Disk, error) {
	mayExist := errors.Is(createErr, rack.ErrAlreadyExists) || errors.Is(createErr, rack.ErrCapacity) || rack.OutcomeUnknown(createErr)
	if !mayExist {
		if errors.Is(createErr, rack.ErrSize) {
			return rack.Disk{}, outOfRange("capacity_range: %w", createErr)
		}
		return rack.Disk{}, createErr
	}
	disk, err := c.rack.DiskByName(ctx, rack.DiskName(c.cluster, req.GetName()))
	switch {
	case errors.Is(err, rack.ErrNotFound) && errors.Is(createErr, rack.ErrCapacity):
		return rack.Disk{}, createErr
	case errors.Is(err, rack.ErrNotFound):
		// The rack may still be at it, or the disk went away in between: only a repetition tells. Any code that a
		// provisioner takes as final would make it forget a disk that appears later.
		return rack.Disk{}, unknownOutcome(ctx, fmt.Errorf("%w; no such disk is there yet: ask again", createErr))
	case err != nil:
		return rack.Disk{}, unknownOutcome(ctx, fmt.Errorf("%w; looking for the disk failed too: %w", createErr, err))
	}
	if err := c.compare(disk, req, params, wanted); err != nil {
		return rack.Disk{}, err
	}
	disk, err = c.settled(ctx, disk)
	switch {
	case errors.Is(err, rack.ErrNotFound):
		return rack.Disk{}, unavailable("volume %q: its disk was there and is gone again: ask again: %w", req.GetName(), err)
	case err != nil:
		return rack.Disk{}, err
	case disk.State == rack.Faulted:
		return rack.Disk{}, unavailable("volume %q: disk %q (%s) is faulted and will not be handed out: delete it on rack %q, or have the rack's operator look at it",
			req.GetName(), disk.Name, disk.ID, c.rack.Name())
	}
	return disk, nil
}

// unknownOutcome gives an error of a create whose disk may exist the code on which a caller keeps asking.
func unknownOutcome(ctx context.Context, err error) error {
	if ctx.Err() != nil {
		return err // statusOf names the caller's own deadline or cancellation
	}
	return unavailable("%w", err)
}

// compare refuses a disk that has the right name and is not what was asked for.
func (c *Controller) compare(disk rack.Disk, req *csi.CreateVolumeRequest, params parameters, wanted rack.Description) error {
	found := func(format string, args ...any) error {
		return alreadyExists("volume %q: disk %q (%s) exists in project %q, but %s", req.GetName(), disk.Name, disk.ID, c.rack.ProjectName(), fmt.Sprintf(format, args...))
	}
	owner, ours := rack.ParseDescription(disk.Description)
	switch {
	case !ours:
		return found("was not made by this plugin (its description is %.80q): rename or delete it", disk.Description)
	case !owner.SameVolume(wanted):
		return found("belongs to volume %q of cluster %q", owner.Name, owner.Cluster)
	case !suits(disk.SizeBytes, req.GetCapacityRange()):
		return found("has %d bytes, which is not in the range from %d to %d", disk.SizeBytes, req.GetCapacityRange().GetRequiredBytes(), req.GetCapacityRange().GetLimitBytes())
	case params.blockSize != 0 && params.blockSize != disk.BlockSize:
		return found("has blocks of %d bytes, not %d", disk.BlockSize, params.blockSize)
	case params.diskType != "" && (params.diskType == diskTypeLocal) != disk.Local:
		return found("is not of type %q", params.diskType)
	case origin(disk) != OriginBlank:
		return found("was made from the %s %s", origin(disk), disk.SnapshotID+disk.ImageID)
	}
	return nil
}

// DeleteVolume deletes the disk of a volume, which is what this plugin made and nothing else. An attached disk is left as
// it is: nothing is ever detached in order to delete it. CSI spec, DeleteVolume.
func (c *Controller) DeleteVolume(ctx context.Context, req *csi.DeleteVolumeRequest) (*csi.DeleteVolumeResponse, error) {
	if err := validateDeleteVolume(req); err != nil {
		return nil, err
	}
	id, ok := rack.ParseID(req.GetVolumeId())
	if !ok {
		return &csi.DeleteVolumeResponse{}, nil // no disk has such an ID
	}
	disk, err := c.rack.Disk(ctx, id)
	if errors.Is(err, rack.ErrNotFound) {
		return &csi.DeleteVolumeResponse{}, c.unconfirmed(ctx)
	}
	if err != nil {
		return nil, err
	}
	if err := c.checkDeletable(ctx, &disk); err != nil {
		return nil, err
	}
	err = c.rack.DeleteDisk(ctx, id)
	switch {
	case errors.Is(err, rack.ErrNotFound):
		return &csi.DeleteVolumeResponse{}, c.unconfirmed(ctx)
	case errors.Is(err, rack.ErrRefused):
		// Somebody attached it in between, most likely.
		if now, lookErr := c.rack.Disk(ctx, id); lookErr == nil && now.InstanceID != "" {
			return nil, inUse(now)
		}
		return nil, err
	case err != nil:
		return nil, err
	}
	return &csi.DeleteVolumeResponse{}, nil
}

// checkDeletable refuses to delete what is in use or not ours. It waits for a disk that is changing state.
func (c *Controller) checkDeletable(ctx context.Context, disk *rack.Disk) error {
	owner, ours := rack.ParseDescription(disk.Description)
	if !ours || owner.Cluster != c.cluster {
		whose := "was not made by this plugin"
		if ours {
			whose = fmt.Sprintf("belongs to cluster %q, this is cluster %q", owner.Cluster, c.cluster)
		}
		return failedPrecondition("disk %q (%s) %s and is not deleted: delete it yourself on rack %q, with \"oxide disk delete --disk %s\", and the volume is gone",
			disk.Name, disk.ID, whose, c.rack.Name(), disk.ID)
	}
	if err := c.checkProject(ctx, *disk); err != nil {
		return err
	}
	settled, err := c.settled(ctx, *disk)
	switch {
	case errors.Is(err, rack.ErrNotFound):
		return nil // DeleteDisk will find the same
	case err != nil:
		return err
	}
	*disk = settled
	if disk.InstanceID != "" {
		return inUse(*disk)
	}
	return nil
}

// checkProject refuses disks of other projects: an ID is looked up in the whole silo (docs/rack.md §1).
func (c *Controller) checkProject(ctx context.Context, disk rack.Disk) error {
	project, err := c.rack.ProjectID(ctx)
	if err != nil {
		return err
	}
	if disk.ProjectID != project {
		return failedPrecondition("disk %q (%s) is in another project than %q: this plugin uses disks of its own project only", disk.Name, disk.ID, c.rack.ProjectName())
	}
	return nil
}

func inUse(disk rack.Disk) error {
	return failedPrecondition("disk %q (%s) is attached to instance %s and is not deleted: unpublish the volume from that node first", disk.Name, disk.ID, disk.InstanceID)
}

// ValidateVolumeCapabilities says whether a volume can be used in the given ways: CSI spec, ValidateVolumeCapabilities.
func (c *Controller) ValidateVolumeCapabilities(ctx context.Context, req *csi.ValidateVolumeCapabilitiesRequest) (*csi.ValidateVolumeCapabilitiesResponse, error) {
	if err := validateValidateVolumeCapabilities(req); err != nil {
		return nil, err
	}
	disk, err := c.disk(ctx, req.GetVolumeId())
	if err != nil {
		return nil, err
	}
	if err := c.unsupported(ctx, req, disk); err != nil {
		var own *rpcError
		if !errors.As(err, &own) {
			return nil, err
		}
		return &csi.ValidateVolumeCapabilitiesResponse{Message: own.Error()}, nil
	}
	return &csi.ValidateVolumeCapabilitiesResponse{Confirmed: &csi.ValidateVolumeCapabilitiesResponse_Confirmed{
		VolumeContext:      req.GetVolumeContext(),
		VolumeCapabilities: req.GetVolumeCapabilities(),
		Parameters:         req.GetParameters(),
	}}, nil
}

// unsupported says why a volume cannot be used as asked: an error with a code of ours is the answer, another one a failure.
func (c *Controller) unsupported(ctx context.Context, req *csi.ValidateVolumeCapabilitiesRequest, disk rack.Disk) error {
	if err := firstError(supportedCapabilities(req.GetVolumeCapabilities()), checkMutableParameters(req.GetMutableParameters())); err != nil {
		return err
	}
	if _, err := parseParameters(req.GetParameters(), req.GetVolumeCapabilities()); err != nil {
		return err
	}
	facts := map[string]string{
		KeyDiskName:  disk.Name,
		KeySizeBytes: strconv.FormatInt(disk.SizeBytes, 10),
		KeyBlockSize: strconv.FormatInt(disk.BlockSize, 10),
	}
	for key, value := range req.GetVolumeContext() {
		if fact, known := facts[key]; known && fact != value {
			return failedPrecondition("volume_context: %s is %q, and the disk's is %q", key, value, fact)
		}
	}
	return c.checkProject(ctx, disk)
}

// ControllerGetCapabilities: CSI spec, ControllerGetCapabilities.
func (c *Controller) ControllerGetCapabilities(context.Context, *csi.ControllerGetCapabilitiesRequest) (*csi.ControllerGetCapabilitiesResponse, error) {
	return &csi.ControllerGetCapabilitiesResponse{Capabilities: controllerCapabilities()}, nil
}

// disk returns the disk of a volume. That there is none is said only after the rack confirmed that this token would see
// it.
func (c *Controller) disk(ctx context.Context, volumeID string) (rack.Disk, error) {
	id, ok := rack.ParseID(volumeID)
	if !ok {
		return rack.Disk{}, notFound("volume_id %q is no disk ID: the ID of a volume is the UUID of its disk", volumeID)
	}
	disk, err := c.rack.Disk(ctx, id)
	if errors.Is(err, rack.ErrNotFound) {
		if unconfirmed := c.unconfirmed(ctx); unconfirmed != nil {
			return rack.Disk{}, unconfirmed
		}
	}
	return disk, err
}

// unconfirmed is UNAVAILABLE when a 404 cannot be believed: nothing is known about the volume then, and no orchestrator
// may conclude that it is gone.
func (c *Controller) unconfirmed(ctx context.Context) error {
	if err := c.rack.ConfirmProject(ctx); err != nil {
		return unavailable("%w", err)
	}
	return nil
}

// origin is what a disk was made from.
func origin(disk rack.Disk) string {
	switch {
	case disk.SnapshotID != "":
		return OriginSnapshot
	case disk.ImageID != "":
		return OriginImage
	}
	return OriginBlank
}

func volumeContext(disk rack.Disk, params parameters) map[string]string {
	values := map[string]string{
		KeyDiskName:  disk.Name,
		KeySizeBytes: strconv.FormatInt(disk.SizeBytes, 10),
		KeyBlockSize: strconv.FormatInt(disk.BlockSize, 10),
	}
	for key, value := range params.forNode {
		values[key] = value
	}
	return values
}
